#include "xqa_decode/sm90/launch.cuh"

namespace attnops::xqa_decode::sm90 {
void launch_gather_bf16_hd192(const Params& params, cudaStream_t stream) {
  sm90::launch<__nv_bfloat16, 192, true>(params, stream);
}
}  // namespace attnops::xqa_decode::sm90
