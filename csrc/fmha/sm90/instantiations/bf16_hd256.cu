#include "fmha/sm90/launch.cuh"

namespace attnops::fmha::sm90 {

const Kernels kBf16Hd256 = kernels_of<Traits<__nv_bfloat16, Shape{.head_dim_qk = 256,
                                                                  .head_dim_v = 256,
                                                                  .keys = 80,
                                                                  .warpgroups = 2,
                                                                  .q_stages = 1,
                                                                  .stages = 2,
                                                                  .registers = 232}>,
                                      Traits<__nv_bfloat16, Shape{.head_dim_qk = 256,
                                                                  .head_dim_v = 256,
                                                                  .keys = 80,
                                                                  .warpgroups = 1,
                                                                  .q_stages = 2,
                                                                  .stages = 2,
                                                                  .registers = 240,
                                                                  .turns = false,
                                                                  .lone = true}>>();

}  // namespace attnops::fmha::sm90
