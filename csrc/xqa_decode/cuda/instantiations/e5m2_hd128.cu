#include "xqa_decode/cuda/launch.cuh"

namespace attnops::xqa_decode {
void launch_e5m2_hd128(const Params& params, cudaStream_t stream) {
  launch<__half, true, 128, __nv_fp8_e5m2>(params, stream);
}
}  // namespace attnops::xqa_decode
