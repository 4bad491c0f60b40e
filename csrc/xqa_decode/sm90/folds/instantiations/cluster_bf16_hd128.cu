#include "xqa_decode/sm90/folds/cluster_launch.cuh"

namespace attnops::xqa_decode::sm90 {
void launch_cluster_folds_bf16_hd128(const Params& params, cudaStream_t stream) {
  launch_cluster_folds<__nv_bfloat16, 128>(params, stream);
}
void launch_cluster_folds_gather_bf16_hd128(const Params& params, cudaStream_t stream) {
  launch_cluster_folds<__nv_bfloat16, 128, true>(params, stream);
}
}  // namespace attnops::xqa_decode::sm90
