#include "fmha/sm90/launch.cuh"

namespace attnops::fmha::sm90 {

void launch_e4m3_hd128(const Params& p, CUstream_st* stream) {
  launch_traits<Traits<__nv_fp8_e4m3, Shape{.head_dim_qk = 128,
                                            .head_dim_v = 128,
                                            .keys = 128,
                                            .warpgroups = 2,
                                            .q_stages = 2,
                                            .stages = 3,
                                            .registers = 216}>>(p, stream);
}

}  // namespace attnops::fmha::sm90
