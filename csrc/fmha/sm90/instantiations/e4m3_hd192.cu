#include "fmha/sm90/launch.cuh"

namespace attnops::fmha::sm90 {

const Kernels kE4m3Hd192 = kernels_of<Traits<__nv_fp8_e4m3, Shape{.head_dim_qk = 192,
                                                                  .head_dim_v = 192,
                                                                  .keys = 128,
                                                                  .warpgroups = 2,
                                                                  .q_stages = 1,
                                                                  .stages = 2,
                                                                  .registers = 224}>>();

}  // namespace attnops::fmha::sm90
