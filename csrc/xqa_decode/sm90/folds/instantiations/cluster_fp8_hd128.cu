#include "xqa_decode/sm90/folds/cluster_launch.cuh"

namespace attnops::xqa_decode::sm90 {
void launch_cluster_folds_fp8_hd128(const Params& params, cudaStream_t stream) {
  launch_cluster_folds<__half, 128, false, uint8_t>(params, stream);
}
void launch_cluster_folds_gather_fp8_hd128(const Params& params, cudaStream_t stream) {
  launch_cluster_folds<__half, 128, true, uint8_t>(params, stream);
}
}  // namespace attnops::xqa_decode::sm90
