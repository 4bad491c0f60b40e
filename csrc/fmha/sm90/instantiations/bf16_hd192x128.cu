#include "fmha/sm90/launch.cuh"

namespace attnops::fmha::sm90 {

const Kernels kBf16Hd192x128 = kernels_of<Traits<__nv_bfloat16, Shape{.head_dim_qk = 192,
                                                                      .head_dim_v = 128,
                                                                      .keys = 128,
                                                                      .warpgroups = 2,
                                                                      .q_stages = 1,
                                                                      .stages = 2,
                                                                      .registers = 216}>,
                                          Traits<__nv_bfloat16, Shape{.head_dim_qk = 192,
                                                                      .head_dim_v = 128,
                                                                      .keys = 64,
                                                                      .warpgroups = 1,
                                                                      .q_stages = 1,
                                                                      .stages = 2,
                                                                      .registers = 184,
                                                                      .turns = false,
                                                                      .ctas = 2}>>();

}  // namespace attnops::fmha::sm90
