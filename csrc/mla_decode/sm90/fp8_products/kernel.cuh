#pragma once
#include "mla_decode/sm90/fp8_products/load.cuh"
#include "mla_decode/sm90/fp8_products/scores.cuh"
#include "mla_decode/sm90/fp8_products/values.cuh"

// MLA decode over dense e4m3 caches on the e4m3 units; docs/kernels/mla_decode_fp8.md.
//
// Warpgroups have roles: one computes the scores and probabilities of every tile, two multiply them by V, 256 columns
// each, and the fourth loads. So the softmax of a tile lies under the products of the one before. The output is
// computed transposed, as V^T P^T: V^T comes from shared memory by transposing loads and two byte permutations a
// register, which no other layout of a one-byte operand allows. The units keep 13 bits of a sum, which the rounding of
// q and P hides.
namespace attnops::mla_decode::sm90::fp8_products {

// By one thread: with a barrier a lane the compiler makes a loop over the lanes.
__device__ inline void init_barriers(uint32_t shared) {
  using L = Layout;
  constexpr int kGiven = 2 * L::kStages, kTaken = kGiven + L::kBuffers;
  if (threadIdx.x % 32 == 0) {
#pragma unroll
    for (int i = 0; i < L::kBarrierCount; ++i) {
      const bool by_scores = i >= kGiven && i < kTaken;
      const int arrivals = i < L::kStages || by_scores ? kGroupThreads : kValueThreads;
      const bool by_all = i == L::kBarrierCount - 1;
      attnops::sm90::mbarrier_init(shared + L::kBarriers + 8 * i, by_all ? kMultiplyThreads : arrivals);
    }
  }
  attnops::sm90::mbarrier_init_fence();
}

// What one warp does before all others begin: the part's row of the plan, the barriers.
__device__ inline void start(const Params& p, const Maps& maps, const Modes& modes, uint8_t* base, uint32_t shared) {
  const int lane = threadIdx.x % 32;
  if (lane == 8 && modes.use_boxes) attnops::sm90::prefetch_map(&maps.latent);
  if (lane == 9 && modes.use_boxes) attnops::sm90::prefetch_map(&maps.rope);
  if (lane == 10 && modes.queries_by_map) attnops::sm90::prefetch_map(&maps.queries.q);
  init_barriers(shared);
  attnops::sm90::wait_for_prerequisites();
  const SplitKvEntry entry = entry_of(p, blockIdx.x);
  if (lane == 0) *reinterpret_cast<SplitKvEntry*>(base + Layout::kEntry) = entry;
}

template <typename T, Options kOptions>
__global__ void __launch_bounds__(kAllThreads, 1)
    mla_decode_fp8_products_kernel(const __grid_constant__ Params p, const __grid_constant__ Maps maps,
                                   const __grid_constant__ Modes modes) {
  extern __shared__ __align__(1024) uint8_t shared_bytes[];
  const uint32_t shared = attnops::sm90::smem_address(shared_bytes);
  if (threadIdx.x / 32 == kMultiplyThreads / 32) {
    start(p, maps, modes, shared_bytes, shared);
  } else {
    attnops::sm90::wait_for_prerequisites();
  }
  __syncthreads();
  attnops::sm90::launch_dependents();
  const int group = __shfl_sync(0xffffffffu, threadIdx.x / kGroupThreads, 0);
  if (group < 2) {
    attnops::sm90::registers_increase<kValueRegisters>();
    ValueConsumer<T, kOptions>(p, modes, group, shared_bytes, shared).run();
  } else if (group == 2) {
    attnops::sm90::registers_decrease<kScoreRegisters>();
    ScoreConsumer<kOptions>(p, modes, shared_bytes, shared).run();
  } else {
    attnops::sm90::registers_decrease<kLoaderRegisters>();
    Loader<kOptions>(p, maps, modes, *reinterpret_cast<const SplitKvEntry*>(shared_bytes + Layout::kEntry), shared)
        .run();
  }
}

}  // namespace attnops::mla_decode::sm90::fp8_products
