#include "fmha/sm90/launch.cuh"

namespace attnops::fmha::sm90 {

void launch_fp16_hd256(const Params& p, CUstream_st* stream) {
  launch<Traits<__half, Shape{.head_dim_qk = 256,
                              .head_dim_v = 256,
                              .keys = 80,
                              .warpgroups = 2,
                              .q_stages = 1,
                              .stages = 2,
                              .registers = 224,
                              .overlap = false}>>(p, stream);
}

}  // namespace attnops::fmha::sm90
