#include "xqa_decode/sm90/launch.cuh"

namespace attnops::xqa_decode::sm90 {
void launch_fp16_hd192(const Params& params, cudaStream_t stream) { launch<__half, 192>(params, stream); }
}  // namespace attnops::xqa_decode::sm90
