#include "xqa_decode/sm90/cluster/launch.cuh"

namespace attnops::xqa_decode::sm90 {
void launch_cluster_bf16_hd64(const Params& params, cudaStream_t stream) {
  launch_cluster<__nv_bfloat16, false, 64>(params, stream);
}
}  // namespace attnops::xqa_decode::sm90
