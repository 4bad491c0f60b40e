#include "device/common/launch_dependent.cuh"
#include "fp4_kv/cuda/decode.cuh"
#include "fp4_kv/cuda/latents.cuh"
#include "fp4_kv/cuda/launch.h"
#include "fp4_kv/cuda/merge.cuh"

namespace attnops::fp4_kv {
namespace {

template <typename T, int kDim, int kRowTiles>
void launch_decode(const DecodeParams& p, cudaStream_t stream) {
  const int64_t works = int64_t{p.batch_size} * p.num_kv_heads * p.num_splits;
  const int blocks = static_cast<int>(ceil_div<int64_t>(works, kWarps));
  if (blocks > 0) {
    constexpr int kBytes = kWarps * kWarpBytes<kDim>;
    const LaunchShape shape{blocks, 32 * kWarps, kBytes, kBytes};
    if (tiles_in_pages(p, kTileKeys) && scales_on(p.k, kDim / 16) && scales_on(p.v, kDim / 16)) {
      launch_dependent<&fp4_decode_kernel<T, kDim, kRowTiles, true>>("fp4_decode_kernel", shape, stream, p);
    } else {
      launch_dependent<&fp4_decode_kernel<T, kDim, kRowTiles, false>>("fp4_decode_kernel", shape, stream, p);
    }
  }
  launch_merge(p, stream);
}

template <typename T>
void launch_latents(const DecodeParams& p, cudaStream_t stream) {
  const int blocks = ceil_div(p.seqlen_q * p.num_q_heads, kLatentRows);
  const int64_t works = int64_t{p.batch_size} * blocks * p.num_splits;
  if (works > 0) {
    constexpr int kBytes = sizeof(LatentShared);
    const LaunchShape shape{static_cast<int>(works), 32 * kLatentWarps, kBytes, kBytes};
    if (tiles_in_pages(p, kLatentKeys) && rows_on(p.k, 16, 2)) {
      launch_dependent<&fp4_latent_kernel<T, true>>("fp4_latent_kernel", shape, stream, p);
    } else {
      launch_dependent<&fp4_latent_kernel<T, false>>("fp4_latent_kernel", shape, stream, p);
    }
  }
  launch_merge(p, stream);
}

}  // namespace

#define ATTNOPS_FP4_LAUNCH(name, type)                                                                            \
  void launch_##name##_hd128_rows8(const DecodeParams& p, cudaStream_t s) { launch_decode<type, 128, 1>(p, s); }  \
  void launch_##name##_hd128_rows16(const DecodeParams& p, cudaStream_t s) { launch_decode<type, 128, 2>(p, s); } \
  void launch_##name##_hd64_rows8(const DecodeParams& p, cudaStream_t s) { launch_decode<type, 64, 1>(p, s); }    \
  void launch_##name##_hd64_rows16(const DecodeParams& p, cudaStream_t s) { launch_decode<type, 64, 2>(p, s); }   \
  void launch_##name##_latents(const DecodeParams& p, cudaStream_t s) { launch_latents<type>(p, s); }
ATTNOPS_FP4_LAUNCH(bf16, __nv_bfloat16)
ATTNOPS_FP4_LAUNCH(fp16, __half)
#undef ATTNOPS_FP4_LAUNCH

void launch_merge(const DecodeParams& p, cudaStream_t stream) {
  if (p.dtype == DType::kBFloat16) return launch_merge_of<__nv_bfloat16>(p, stream);
  launch_merge_of<__half>(p, stream);
}

}  // namespace attnops::fp4_kv
