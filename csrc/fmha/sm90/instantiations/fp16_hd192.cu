#include "fmha/sm90/launch.cuh"

namespace attnops::fmha::sm90 {

const Kernels kFp16Hd192 = kernels_of<Traits<__half, Shape{.head_dim_qk = 192,
                                                           .head_dim_v = 192,
                                                           .keys = 96,
                                                           .warpgroups = 2,
                                                           .q_stages = 1,
                                                           .stages = 2,
                                                           .registers = 216}>>();

}  // namespace attnops::fmha::sm90
