#pragma once
#include "sparse_indexer/cuda/row_cluster.cuh"

namespace attnops::sparse_indexer {

inline constexpr int kThreads = 512, kWarps = kThreads / 32;
inline constexpr int kBins = 2048, kRounds = 4;
inline constexpr uint32_t kNone = ~0u;

struct Shared {
  uint32_t bins[kRounds][kBins];
  uint2 warp_sums[kWarps];
  // What find_bin finds.
  uint32_t found_bin, found_above, found_count;  // of the whole row
  uint32_t earlier_above, earlier_count;         // of the CTAs before this one
  uint32_t max_key;                              // of this CTA
};

__device__ inline void clear_bins(Shared& shared) {
  for (int i = threadIdx.x; i < kRounds * kBins / 4; i += kThreads) {
    reinterpret_cast<uint4*>(shared.bins)[i] = make_uint4(0, 0, 0, 0);
  }
  if (threadIdx.x == 0) shared.max_key = 0;
}

// The sum of `value` over the threads before this one. To be called once between two barriers of `sums`.
__device__ inline uint2 sum_before(uint2 value, uint2 (&sums)[kWarps]) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  uint2 inclusive = value;
#pragma unroll
  for (int step = 1; step < 32; step *= 2) {
    const uint32_t x = __shfl_up_sync(~0u, inclusive.x, step), y = __shfl_up_sync(~0u, inclusive.y, step);
    if (lane >= step) inclusive = {inclusive.x + x, inclusive.y + y};
  }
  if (lane == 31) sums[warp] = inclusive;
  __syncthreads();
  uint2 before{inclusive.x - value.x, inclusive.y - value.y};
  const uint2 mine = lane < warp ? sums[lane % kWarps] : make_uint2(0, 0);
  before.x += __reduce_add_sync(~0u, mine.x);
  before.y += __reduce_add_sync(~0u, mine.y);
  return before;
}

// Finds, from the counts of all CTAs, the bin with the key of rank `rank` from the top, counted from 1. All CTAs have
// counted before. found_bin is kNone where there are fewer keys.
__device__ inline void find_bin(Shared& shared, const Cluster& cluster, int round, uint32_t rank) {
  constexpr int kPer = kBins / kThreads;
  static_assert(kPer == 4);
  const int from_top = kThreads - 1 - static_cast<int>(threadIdx.x);  // thread 0 has the highest bins
  const uint4* const own = reinterpret_cast<const uint4*>(shared.bins[round]) + from_top;
  uint32_t all[kPer] = {}, earlier[kPer] = {};
  constexpr int kAtOnce = 4;
  for (int first = 0; first < cluster.size; first += kAtOnce) {
    uint4 v[kAtOnce];
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      v[i] = first + i < cluster.size ? cluster.load(own, first + i) : make_uint4(0, 0, 0, 0);
    }
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      const uint32_t counts[kPer] = {v[i].w, v[i].z, v[i].y, v[i].x};
      const bool is_earlier = first + i < cluster.rank;
#pragma unroll
      for (int j = 0; j < kPer; ++j) {
        all[j] += counts[j];
        earlier[j] += is_earlier ? counts[j] : 0;
      }
    }
  }
  const uint2 mine{all[0] + all[1] + all[2] + all[3], earlier[0] + earlier[1] + earlier[2] + earlier[3]};
  if (threadIdx.x == 0) shared.found_bin = kNone;
  uint2 above = sum_before(mine, shared.warp_sums);
  if (above.x < rank && above.x + mine.x >= rank) {
#pragma unroll
    for (int i = 0; i < kPer; ++i) {
      if (above.x < rank && above.x + all[i] >= rank) {
        shared.found_bin = static_cast<uint32_t>(from_top * kPer + kPer - 1 - i);
        shared.found_above = above.x;
        shared.found_count = all[i];
        shared.earlier_above = above.y;
        shared.earlier_count = earlier[i];
      }
      above = {above.x + all[i], above.y + earlier[i]};
    }
  }
  __syncthreads();
}

}  // namespace attnops::sparse_indexer
