#include "xqa_decode/sm90/fp8/launch.cuh"

namespace attnops::xqa_decode::sm90::fp8 {
void launch_gather_hd128(const Params& params, cudaStream_t stream) { launch<true>(params, stream); }
}  // namespace attnops::xqa_decode::sm90::fp8
