#include "fmha/cuda/launch.cuh"

namespace attnops::fmha {

void launch_fp16_hd256(const Params& p, CUstream_st* stream) {
  launch_traits<Traits<__half, 256, 256, 32, 1, 4>>(p, stream);
}

}  // namespace attnops::fmha
