#include "xqa_decode/sm90/folds/launch.cuh"

namespace attnops::xqa_decode::sm90 {
void launch_folds_fp16_hd64(const Params& params, cudaStream_t stream) { launch_folds<__half, 64>(params, stream); }
void launch_folds_gather_fp16_hd64(const Params& params, cudaStream_t stream) {
  launch_folds<__half, 64, true>(params, stream);
}
}  // namespace attnops::xqa_decode::sm90
