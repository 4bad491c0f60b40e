#include "xqa_decode/sm90/launch.cuh"

namespace attnops::xqa_decode::sm90 {
void launch_gather_fp16_hd192(const Params& params, cudaStream_t stream) {
  sm90::launch<__half, 192, true>(params, stream);
}
}  // namespace attnops::xqa_decode::sm90
