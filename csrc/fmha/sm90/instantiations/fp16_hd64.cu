#include "fmha/sm90/launch.cuh"

namespace attnops::fmha::sm90 {

void launch_fp16_hd64(const Params& p, CUstream_st* stream) {
  launch_traits<Traits<__half, 64, 64, 128, 3, 2, 2, 152>>(p, stream);
}

}  // namespace attnops::fmha::sm90
