#include "xqa_decode/cuda/launch.cuh"

namespace attnops::xqa_decode {
void launch_fp16_hd128(const Params& params, cudaStream_t stream) { launch<__half, false, 128>(params, stream); }
}  // namespace attnops::xqa_decode
