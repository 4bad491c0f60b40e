#include "xqa_decode/sm90/cluster_wgmma/launch.cuh"

namespace attnops::xqa_decode::sm90 {
void launch_cluster_wgmma_bf16_hd192(const Params& params, cudaStream_t stream) {
  launch_cluster_wgmma<__nv_bfloat16, 192>(params, stream);
}
}  // namespace attnops::xqa_decode::sm90
