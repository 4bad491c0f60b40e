#include "xqa_decode/sm90/cluster_wgmma/launch.cuh"

namespace attnops::xqa_decode::sm90 {
void launch_cluster_blocks_gather_fp8_hd128(const Params& params, cudaStream_t stream) {
  launch_cluster_blocks<__half, 128, true, uint8_t>(params, stream);
}
}  // namespace attnops::xqa_decode::sm90
