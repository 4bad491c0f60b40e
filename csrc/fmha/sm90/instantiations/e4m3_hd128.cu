#include "fmha/sm90/launch.cuh"

namespace attnops::fmha::sm90 {

const Kernels kE4m3Hd128 = kernels_of<Traits<__nv_fp8_e4m3, Shape{.head_dim_qk = 128,
                                                                  .head_dim_v = 128,
                                                                  .keys = 128,
                                                                  .warpgroups = 2,
                                                                  .q_stages = 2,
                                                                  .stages = 3,
                                                                  .registers = 216}>>();

}  // namespace attnops::fmha::sm90
