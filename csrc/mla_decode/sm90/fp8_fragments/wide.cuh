#pragma once
#include "mla_decode/sm90/fp8_fragments/wide_scores.cuh"
#include "mla_decode/sm90/fp8_fragments/wide_values.cuh"

// Blocks of up to 64 query rows. Warpgroups have roles: one computes the scores and probabilities of every tile, two
// multiply them by V, 256 columns each, and the fourth loads. So the softmax of a tile lies under the products of the
// one before. docs/kernels/mla_decode_fp8.md.
namespace attnops::mla_decode::sm90::fp8_fragments {

// By one thread: with a barrier a lane the compiler makes a loop over the lanes.
template <class At>
__device__ inline void init_wide_barriers(uint32_t shared) {
  if (threadIdx.x % 32 == 0) {
#pragma unroll
    for (int i = 0; i < 2 * (At::kRingTiles + kWideBuffers); ++i) {
      const int first = i < 2 * At::kRingTiles ? 32 * kLoadingWarps : kGroupThreads;
      attnops::sm90::mbarrier_init(shared + At::kBarriers + 8 * i, i % 2 == 0 ? first : kValueThreads);
    }
    attnops::sm90::mbarrier_init(At::queries_barrier(shared), kValueThreads);
    attnops::sm90::mbarrier_init(At::sums_barrier(shared), At::kConsumerThreads);
    if constexpr (At::kCluster) attnops::sm90::mbarrier_init(shared + At::kMergeBarrier, 1);
  }
  attnops::sm90::mbarrier_init_fence();
}

template <typename T, class At>
__global__ void __launch_bounds__(At::kThreads, 1)
    mla_decode_fp8_wide_kernel(const __grid_constant__ Params p, const __grid_constant__ WideMaps maps,
                               const __grid_constant__ Modes modes, const __grid_constant__ WideModes wide) {
  extern __shared__ __align__(1024) uint8_t shared_bytes[];
  const uint32_t shared = attnops::sm90::smem_address(shared_bytes);
  const int group = threadIdx.x / kGroupThreads;
  if (threadIdx.x / 32 == At::kConsumerThreads / 32) init_wide_barriers<At>(shared);
  if (threadIdx.x / 32 == At::kConsumerThreads / 32 + 1) {
    const int lane = threadIdx.x % 32;
    if (lane == 8 && modes.use_boxes && !At::kScaled) attnops::sm90::prefetch_map(&maps.kv);
    if (lane == 9 && wide.queries_by_map) attnops::sm90::prefetch_map(&maps.queries.q);
    if (lane == 10 && wide.queries_by_map) attnops::sm90::prefetch_map(&maps.queries.q_pe);
    attnops::sm90::wait_for_prerequisites();
    if constexpr (!At::kShort) {
      const SplitKvEntry entry = entry_for<At::kOptions>(p, blockIdx.x);
      if (lane == 0) *reinterpret_cast<SplitKvEntry*>(shared_bytes + At::kEntry) = entry;
    }
  }
  __syncthreads();
  if constexpr (At::kCluster) attnops::sm90::cluster_arrive_relaxed();
  attnops::sm90::wait_for_prerequisites();
  if (group < 2) {
    attnops::sm90::registers_increase<At::kValueRegisters>();
    ValueConsumer<T, At>(p, wide.out_aligned, shared_bytes, shared).run();
  } else if (group == 2) {
    attnops::sm90::registers_decrease<At::kScoreRegisters>();
    ScoreConsumer<T, At>(p, shared_bytes, shared).run();
  } else {
    attnops::sm90::registers_decrease<At::kLoaderRegisters>();
    Loader<At> loader(p, &maps.kv, modes, shared_bytes, shared, &maps.queries, wide.queries_by_map);
    if constexpr (At::kShort) {
      loader.run_short();
    } else {
      loader.run(*reinterpret_cast<const SplitKvEntry*>(shared_bytes + At::kEntry));
    }
  }
}

}  // namespace attnops::mla_decode::sm90::fp8_fragments
