#pragma once
#include "mla_decode/sm90/kernel.cuh"
#include "mla_decode/sm90/ring/launch.h"
#include "mla_decode/sm90/ring/scores.cuh"
#include "mla_decode/sm90/ring/values.cuh"

// MLA decode on Hopper for many rows; docs/kernels/mla_decode_sm90.md explains the schedule.
//
// A CTA takes one part of the plan, as in the kernel for all calls, but divides the work otherwise: one warpgroup
// computes the scores and probabilities of every tile, with the queries in its registers, two accumulate half of the
// output's columns each. Where the queries were in shared memory there is a third KV tile.
namespace attnops::mla_decode::sm90::ring {

// Whether a part has so many tiles that the ring is faster. In batch-invariant mode the bits may depend on nothing that
// another request changes, and the host has decided. By all lanes of a warp.
__device__ inline bool suits_part(const Params& p) {
  if (p.fixed_split_tokens != 0) return true;
  attnops::sm90::wait_for_prerequisites();
  const SplitKvEntry entry = entry_of(p, blockIdx.x);
  if (entry.begin_work == entry.end_work) return entry.end_tile - entry.begin_tile >= kManyTiles;
  const int lane = threadIdx.x % 32, work = entry.begin_work + lane, last_work = last_work_of(entry);
  if (last_work - entry.begin_work >= 32) return false;  // short ones
  int tiles = 0;
  if (work <= last_work) {
    const int length = length_of(p.cache_seqlens[block_place(p, work).request]);
    tiles = work == entry.end_work ? entry.end_tile : ceil_div(length, kPlanTileTokens);
    if (lane == 0) tiles -= entry.begin_tile;
  }
  return __reduce_add_sync(~0u, tiles) >= kManyTiles;
}

template <typename T>
__global__ void __launch_bounds__(kThreads, 1)
    mla_decode_ring_kernel(const __grid_constant__ Params p, const __grid_constant__ Maps maps,
                           const __grid_constant__ Modes modes, int even_shares) {
  extern __shared__ __align__(1024) uint8_t shared_bytes[];
  const uint32_t shared = attnops::sm90::smem_address(shared_bytes);
  const int group = threadIdx.x / kGroupThreads;
  if (!__syncthreads_or(threadIdx.x < 32 && suits_part(p))) {
    return decode_part<T, Options::kCommon, Loads::kBoxes>(p, maps, modes, shared_bytes, shared);
  }
  if (group == 0) {
    attnops::sm90::registers_decrease<kValuesRegisters>();
    Values<T, 0>(p, maps, even_shares, shared_bytes, shared).run();
  } else if (group == 1) {
    attnops::sm90::registers_decrease<kValuesRegisters>();
    Values<T, 1>(p, maps, even_shares, shared_bytes, shared).run();
  } else {
    attnops::sm90::registers_increase<kScoresRegisters>();
    Scores<T>(p, shared_bytes, shared).run();
  }
}

}  // namespace attnops::mla_decode::sm90::ring
