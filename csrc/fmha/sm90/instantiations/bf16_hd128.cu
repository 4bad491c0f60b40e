#include <cstdlib>

#include "fmha/sm90/launch.cuh"

namespace attnops::fmha::sm90 {

void launch_bf16_hd128(const Params& p, CUstream_st* stream) {
  const char* const variant = std::getenv("ATTNOPS_NARROW_TRY");
  if (p.kv_dtype != p.dtype && variant != nullptr && *variant == 'b') {
    return launch_traits<Traits<__nv_bfloat16, Shape{.head_dim_qk = 128,
                                                     .head_dim_v = 128,
                                                     .keys = 128,
                                                     .warpgroups = 2,
                                                     .q_stages = 1,
                                                     .stages = 2,
                                                     .registers = 216,
                                                     .ahead = 4}>::Narrow>(p, stream);
  }
  if (p.kv_dtype != p.dtype && variant != nullptr && *variant == 'c') {
    return launch_traits<Traits<__nv_bfloat16, Shape{.head_dim_qk = 128,
                                                     .head_dim_v = 128,
                                                     .keys = 128,
                                                     .warpgroups = 2,
                                                     .q_stages = 2,
                                                     .stages = 2,
                                                     .registers = 216,
                                                     .ahead = 1}>::Narrow>(p, stream);
  }
  if (p.kv_dtype != p.dtype && variant != nullptr && *variant == 'd') {
    return launch_traits<Traits<__nv_bfloat16, Shape{.head_dim_qk = 128,
                                                     .head_dim_v = 128,
                                                     .keys = 128,
                                                     .warpgroups = 2,
                                                     .q_stages = 2,
                                                     .stages = 2,
                                                     .registers = 216,
                                                     .prefetch = true}>::Narrow>(p, stream);
  }
  launch_by_size<Traits<__nv_bfloat16, Shape{.head_dim_qk = 128,
                                             .head_dim_v = 128,
                                             .keys = 128,
                                             .warpgroups = 2,
                                             .q_stages = 2,
                                             .stages = 2,
                                             .registers = 216}>,
                 Traits<__nv_bfloat16, Shape{.head_dim_qk = 128,
                                             .head_dim_v = 128,
                                             .keys = 64,
                                             .warpgroups = 1,
                                             .q_stages = 2,
                                             .stages = 2,
                                             .registers = 184,
                                             .turns = false,
                                             .ctas = 2}>>(p, stream);
}

}  // namespace attnops::fmha::sm90
