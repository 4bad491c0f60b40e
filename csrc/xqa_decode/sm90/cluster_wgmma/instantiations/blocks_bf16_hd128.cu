#include "xqa_decode/sm90/cluster_wgmma/launch.cuh"

namespace attnops::xqa_decode::sm90 {
void launch_cluster_blocks_bf16_hd128(const Params& params, cudaStream_t stream) {
  launch_cluster_blocks<__nv_bfloat16, 128>(params, stream);
}
}  // namespace attnops::xqa_decode::sm90
