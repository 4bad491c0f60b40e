#include "xqa_decode/sm90/launch.cuh"

namespace attnops::xqa_decode::sm90 {
void launch_fp8_hd128(const Params& params, cudaStream_t stream) { launch_fp8<128, false>(params, stream); }
}  // namespace attnops::xqa_decode::sm90
