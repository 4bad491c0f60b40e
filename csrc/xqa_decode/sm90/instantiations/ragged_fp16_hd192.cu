#include "xqa_decode/sm90/launch.cuh"

namespace attnops::xqa_decode::sm90 {
void launch_ragged_fp16_hd192(const Params& params, cudaStream_t stream) {
  launch_ragged<__half, 192, false>(params, stream);
}
}  // namespace attnops::xqa_decode::sm90
