#include "xqa_decode/sm90/launch.cuh"

namespace attnops::xqa_decode::sm90 {
void launch_ragged_fp8_hd64(const Params& params, cudaStream_t stream) {
  launch_ragged<__half, 64, false, uint8_t>(params, stream);
}
void launch_ragged_gather_fp8_hd64(const Params& params, cudaStream_t stream) {
  launch_ragged<__half, 64, true, uint8_t>(params, stream);
}
}  // namespace attnops::xqa_decode::sm90
