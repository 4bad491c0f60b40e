#include "xqa_decode/cuda/launch.cuh"

namespace attnops::xqa_decode {
void launch_fp16_hd64(const Params& params, cudaStream_t stream) { launch<__half, false, 64>(params, stream); }
}  // namespace attnops::xqa_decode
