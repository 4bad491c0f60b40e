#include "fmha/cuda/launch.cuh"

namespace attnops::fmha {

void launch_fp16_hd256(const Params& p, CUstream_st* stream) {
  // Tiles of 64 keys where two CTAs share an SM with them.
  using Wide = Traits<__half, 256, 256, 64, 1, 4>;
  if (size_of(p.kv_dtype) == 2 && ctas_per_sm<Wide>(1, false) == Wide::kCtasPerSm) {
    launch_traits<Wide>(p, stream);
  } else {
    launch_traits<Traits<__half, 256, 256, 32, 1, 4>>(p, stream);
  }
}

}  // namespace attnops::fmha
