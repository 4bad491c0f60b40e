#include "fmha/sm90/launch.cuh"

namespace attnops::fmha::sm90 {

void launch_bf16_hd64(const Params& p, CUstream_st* stream) {
  launch_traits<Traits<__nv_bfloat16, 64, 64, 128, 3, 2, 2, 152>>(p, stream);
}

}  // namespace attnops::fmha::sm90
