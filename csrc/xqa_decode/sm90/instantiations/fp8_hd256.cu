#include "xqa_decode/sm90/launch.cuh"

namespace attnops::xqa_decode::sm90 {
void launch_fp8_hd256(const Params& params, cudaStream_t stream) { launch_fp8<256, false>(params, stream); }
}  // namespace attnops::xqa_decode::sm90
