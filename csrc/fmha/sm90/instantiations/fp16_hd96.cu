#include "fmha/sm90/launch.cuh"

namespace attnops::fmha::sm90 {

void launch_fp16_hd96(const Params& p, CUstream_st* stream) {
  launch_traits<Traits<__half, 96, 96, 128, 2, 2, 2, 216>>(p, stream);
}

}  // namespace attnops::fmha::sm90
