#include "xqa_decode/sm90/launch.cuh"

namespace attnops::xqa_decode::sm90 {
void launch_gather_fp8_hd64(const Params& params, cudaStream_t stream) { launch_fp8<64, true>(params, stream); }
}  // namespace attnops::xqa_decode::sm90
