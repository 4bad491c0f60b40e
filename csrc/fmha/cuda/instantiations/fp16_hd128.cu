#include "fmha/cuda/launch.cuh"

namespace attnops::fmha {

void launch_fp16_hd128(const Params& p, CUstream_st* stream) {
  launch_traits<Traits<__half, 128, 128, 64, 2, 4>>(p, stream);
}

}  // namespace attnops::fmha
