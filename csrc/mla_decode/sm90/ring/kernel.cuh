#pragma once
#include "mla_decode/sm90/ring/scores.cuh"
#include "mla_decode/sm90/ring/values.cuh"

// MLA decode on Hopper for many rows; docs/kernels/mla_decode_sm90.md explains the schedule.
//
// A CTA takes one part of the plan, as in the kernel for all calls, but divides the work otherwise: one warpgroup
// computes the scores and probabilities of every tile, with the queries in its registers, two accumulate half of the
// output's columns each. Where the queries were in shared memory there is a third KV tile.
namespace attnops::mla_decode::sm90::ring {

// What one warp does before all others begin: the barriers, and, once the kernels ahead are done, the part's row of the
// plan.
__device__ inline void start(const Params& p, const Maps& maps, uint8_t* base, uint32_t shared) {
  const int lane = threadIdx.x % 32;
  auto* entry = reinterpret_cast<SplitKvEntry*>(base + kEntry);
  if (lane == 8) attnops::sm90::prefetch_map(&maps.q);
  if (lane == 9) attnops::sm90::prefetch_map(&maps.kv);
  constexpr int kWarps = kGroupThreads / 32;
  if (lane < kBarrierCount) {
    attnops::sm90::mbarrier_init(shared + kBarriers + 8 * lane, lane < kSlots ? 2 * kWarps : kWarps);
  }
  attnops::sm90::mbarrier_init_fence();
  attnops::sm90::wait_for_prerequisites();
  if (lane < 8) reinterpret_cast<int*>(entry)[lane] = reinterpret_cast<const int*>(&entry_of(p, blockIdx.x))[lane];
}

template <typename T>
__global__ void __launch_bounds__(kThreads, 1)
    mla_decode_ring_kernel(const __grid_constant__ Params p, const __grid_constant__ Maps maps) {
  extern __shared__ __align__(1024) uint8_t shared_bytes[];
  const uint32_t shared = attnops::sm90::smem_address(shared_bytes);
  if (threadIdx.x / 32 == 3) {
    start(p, maps, shared_bytes, shared);
  } else {
    attnops::sm90::wait_for_prerequisites();
  }
  __syncthreads();
  attnops::sm90::launch_dependents();
  const int group = threadIdx.x / kGroupThreads;
  if (group == 0) {
    attnops::sm90::registers_decrease<kValuesRegisters>();
    Values<T, 0>(p, maps, shared_bytes, shared).run();
  } else if (group == 1) {
    attnops::sm90::registers_decrease<kValuesRegisters>();
    Values<T, 1>(p, maps, shared_bytes, shared).run();
  } else {
    attnops::sm90::registers_increase<kScoresRegisters>();
    Scores<T>(p, shared_bytes, shared).run();
  }
}

}  // namespace attnops::mla_decode::sm90::ring
