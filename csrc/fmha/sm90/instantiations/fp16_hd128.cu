#include "fmha/sm90/launch.cuh"

namespace attnops::fmha::sm90 {

void launch_fp16_hd128(const Params& p, CUstream_st* stream) {
  launch_traits<Traits<__half, 128, 128, 128, 2, 2, 2, 216>>(p, stream);
}

}  // namespace attnops::fmha::sm90
