#include "device/common/launch_dependent.cuh"
#include "fp4_kv/cuda/launch.h"
#include "fp4_kv/sm90/latents.cuh"
#include "fp4_kv/sm90/launch.h"

namespace attnops::fp4_kv::sm90 {
namespace {

template <typename T>
void launch_latents(const DecodeParams& p, cudaStream_t stream) {
  const int blocks = ceil_div(p.seqlen_q * p.num_q_heads, kLatentRows);
  const int64_t works = int64_t{p.batch_size} * blocks * p.num_splits;
  if (works > 0) {
    constexpr int kBytes = sizeof(LatentShared);
    const LaunchShape shape{static_cast<int>(works), 32 * kLatentWarps, kBytes, kBytes};
    launch_dependent<&fp4_latent_sm90_kernel<T>>("fp4_latent_sm90_kernel", shape, stream, p);
  }
  launch_merge(p, stream);
}

}  // namespace

void launch_bf16_latents(const DecodeParams& p, cudaStream_t stream) { launch_latents<__nv_bfloat16>(p, stream); }
void launch_fp16_latents(const DecodeParams& p, cudaStream_t stream) { launch_latents<__half>(p, stream); }

}  // namespace attnops::fp4_kv::sm90
