#include "xqa_decode/sm90/launch.cuh"

namespace attnops::xqa_decode::sm90 {
void launch_fp16_hd256(const Params& params, cudaStream_t stream) { launch<__half, 256>(params, stream); }
}  // namespace attnops::xqa_decode::sm90
