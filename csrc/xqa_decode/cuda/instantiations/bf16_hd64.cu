#include "xqa_decode/cuda/launch.cuh"

namespace attnops::xqa_decode {
void launch_bf16_hd64(const Params& params, cudaStream_t stream) { launch<__nv_bfloat16, false, 64>(params, stream); }
}  // namespace attnops::xqa_decode
