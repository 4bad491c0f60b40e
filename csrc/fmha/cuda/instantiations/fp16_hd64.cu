#include "fmha/cuda/launch.cuh"

namespace attnops::fmha {

void launch_fp16_hd64(const Params& p, CUstream_st* stream) {
  launch_traits<Traits<__half, 64, 64, 64, 2, 6>>(p, stream);
}

}  // namespace attnops::fmha
