#include "xqa_decode/sm90/cluster/launch.cuh"

namespace attnops::xqa_decode::sm90 {
void launch_cluster_fp8_hd128(const Params& params, cudaStream_t stream) {
  launch_cluster<__half, true, 128>(params, stream);
}
}  // namespace attnops::xqa_decode::sm90
