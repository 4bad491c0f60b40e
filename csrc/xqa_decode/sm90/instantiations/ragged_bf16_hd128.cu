#include "xqa_decode/sm90/launch.cuh"

namespace attnops::xqa_decode::sm90 {
void launch_ragged_bf16_hd128(const Params& params, cudaStream_t stream) {
  launch_ragged<__nv_bfloat16, 128, false>(params, stream);
}
void launch_ragged_gather_bf16_hd128(const Params& params, cudaStream_t stream) {
  launch_ragged<__nv_bfloat16, 128, true>(params, stream);
}
}  // namespace attnops::xqa_decode::sm90
