#include "fmha/sm90/launch.cuh"

namespace attnops::fmha::sm90 {

const Kernels kBf16Hd64 = kernels_of<Traits<__nv_bfloat16, Shape{.head_dim_qk = 64,
                                                                 .head_dim_v = 64,
                                                                 .keys = 96,
                                                                 .warpgroups = 3,
                                                                 .q_stages = 2,
                                                                 .stages = 3,
                                                                 .registers = 152}>,
                                     Traits<__nv_bfloat16, Shape{.head_dim_qk = 64,
                                                                 .head_dim_v = 64,
                                                                 .keys = 64,
                                                                 .warpgroups = 1,
                                                                 .q_stages = 2,
                                                                 .stages = 2,
                                                                 .registers = 184,
                                                                 .turns = false,
                                                                 .ctas = 2}>>();

}  // namespace attnops::fmha::sm90
