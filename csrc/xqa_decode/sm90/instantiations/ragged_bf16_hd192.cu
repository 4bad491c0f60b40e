#include "xqa_decode/sm90/launch.cuh"

namespace attnops::xqa_decode::sm90 {
void launch_ragged_bf16_hd192(const Params& params, cudaStream_t stream) {
  launch_ragged<__nv_bfloat16, 192, false>(params, stream);
}
}  // namespace attnops::xqa_decode::sm90
