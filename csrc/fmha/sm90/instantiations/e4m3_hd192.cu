#include "fmha/sm90/launch.cuh"

namespace attnops::fmha::sm90 {

void launch_e4m3_hd192(const Params& p, CUstream_st* stream) {
  launch_traits<Traits<__nv_fp8_e4m3, Shape{.head_dim_qk = 192,
                                            .head_dim_v = 192,
                                            .keys = 128,
                                            .warpgroups = 2,
                                            .q_stages = 1,
                                            .stages = 2,
                                            .registers = 224}>>(p, stream);
}

}  // namespace attnops::fmha::sm90
