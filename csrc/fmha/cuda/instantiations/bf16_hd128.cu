#include "fmha/cuda/launch.cuh"

namespace attnops::fmha {

void launch_bf16_hd128(const Params& p, CUstream_st* stream) {
  launch_traits<Traits<__nv_bfloat16, 128, 128, 64, 2, 4>>(p, stream);
}

}  // namespace attnops::fmha
