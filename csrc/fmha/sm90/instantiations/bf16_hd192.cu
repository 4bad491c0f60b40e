#include "fmha/sm90/launch.cuh"

namespace attnops::fmha::sm90 {

void launch_bf16_hd192(const Params& p, CUstream_st* stream) {
  launch_traits<Traits<__nv_bfloat16, 192, 192, 96, 2, 1, 2, 216>>(p, stream);
}

}  // namespace attnops::fmha::sm90
