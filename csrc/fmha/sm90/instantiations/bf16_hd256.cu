#include "fmha/sm90/launch.cuh"

namespace attnops::fmha::sm90 {

void launch_bf16_hd256(const Params& p, CUstream_st* stream) {
  launch_traits<Traits<__nv_bfloat16, 256, 256, 80, 2, 1, 2, 224>>(p, stream);
}

}  // namespace attnops::fmha::sm90
