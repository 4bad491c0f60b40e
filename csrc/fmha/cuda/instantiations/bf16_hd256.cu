#include "fmha/cuda/launch.cuh"

namespace attnops::fmha {

void launch_bf16_hd256(const Params& p, CUstream_st* stream) {
  launch_traits<Traits<__nv_bfloat16, 256, 256, 32, 1, 4>>(p, stream);
}

}  // namespace attnops::fmha
