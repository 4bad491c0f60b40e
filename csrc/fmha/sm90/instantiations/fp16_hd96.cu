#include "fmha/sm90/launch.cuh"

namespace attnops::fmha::sm90 {

const Kernels kFp16Hd96 = kernels_of<Traits<__half, Shape{.head_dim_qk = 96,
                                                          .head_dim_v = 96,
                                                          .keys = 128,
                                                          .warpgroups = 2,
                                                          .q_stages = 2,
                                                          .stages = 2,
                                                          .registers = 216}>,
                                     Traits<__half, Shape{.head_dim_qk = 96,
                                                          .head_dim_v = 96,
                                                          .keys = 64,
                                                          .warpgroups = 1,
                                                          .q_stages = 2,
                                                          .stages = 2,
                                                          .registers = 184,
                                                          .turns = false,
                                                          .ctas = 2}>>();

}  // namespace attnops::fmha::sm90
