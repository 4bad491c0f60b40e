#pragma once
#include "sparse_indexer/cuda/row_cluster.cuh"

namespace attnops::sparse_indexer {

inline constexpr int kThreads = 512, kWarps = kThreads / 32;
inline constexpr int kBins = 2048, kRounds = 4;
inline constexpr int kFine = 32, kCoarse = kBins / kFine;  // bins that count as one at first
inline constexpr uint32_t kNone = ~0u;

struct Shared {
  uint32_t bins[kRounds][kBins];
  uint32_t coarse[kRounds][kCoarse];
  uint2 warp_sums[kWarps];
  // What find_bin finds.
  uint32_t found_bin, found_above, found_count;  // of the whole row
  uint32_t earlier_above, earlier_count;         // of the CTAs before this one
  uint32_t max_key, row_max;                     // of this CTA, and of all
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

// Where the key of rank `rank` from the top is, counted from 1, among the bins of the lanes, lane 0 the highest. Counts
// are of all CTAs, and of those before this one. The lane that has it is told what is above; -1 where none has.
__device__ inline int find_lane(uint2 counts, uint2 above_all, uint32_t rank, uint2& above) {
  const int lane = threadIdx.x % 32;
  uint2 inclusive = counts;
#pragma unroll
  for (int step = 1; step < 32; step *= 2) {
    const uint32_t x = __shfl_up_sync(~0u, inclusive.x, step), y = __shfl_up_sync(~0u, inclusive.y, step);
    if (lane >= step) inclusive = {inclusive.x + x, inclusive.y + y};
  }
  above = {above_all.x + inclusive.x - counts.x, above_all.y + inclusive.y - counts.y};
  return __ffs(__ballot_sync(~0u, above.x < rank && above.x + counts.x >= rank)) - 1;
}

// find_bin where a row has one CTA: by all threads, four bins each, which then takes less time.
__device__ inline void find_own_bin(Shared& shared, int round, uint32_t rank) {
  constexpr int kPer = kBins / kThreads;
  static_assert(kPer == 4);
  const int from_top = kThreads - 1 - static_cast<int>(threadIdx.x);  // thread 0 has the highest bins
  const uint4 own = reinterpret_cast<const uint4*>(shared.bins[round])[from_top];
  const uint32_t counts[kPer] = {own.w, own.z, own.y, own.x}, mine = own.x + own.y + own.z + own.w;
  if (threadIdx.x == 0) {
    shared.found_bin = kNone;
    shared.row_max = shared.max_key;
  }
  uint32_t above = sum_before({mine, 0}, shared.warp_sums).x;
  if (above < rank && above + mine >= rank) {
#pragma unroll
    for (int i = 0; i < kPer; ++i) {
      if (above < rank && above + counts[i] >= rank) {
        shared.found_bin = static_cast<uint32_t>(from_top * kPer + kPer - 1 - i);
        shared.found_above = above;
        shared.found_count = counts[i];
        shared.earlier_above = shared.earlier_count = 0;
      }
      above += counts[i];
    }
  }
  __syncthreads();
}

// Finds, from the counts of all CTAs, the bin with the key of rank `rank` from the top, counted from 1. found_bin is
// kNone where there are fewer keys. One warp reads other CTAs' counts: sums of 32 bins, then those 32.
__device__ inline void find_bin(Shared& shared, const Cluster& cluster, int round, uint32_t rank) {
  static_assert(kBins == 4 * kThreads && kCoarse == 64);
  const int lane = threadIdx.x % 32;
  __syncthreads();
  if (cluster.size == 1) return find_own_bin(shared, round, rank);
  const uint4 own = reinterpret_cast<const uint4*>(shared.bins[round])[threadIdx.x];
  uint32_t sum = own.x + own.y + own.z + own.w;
#pragma unroll
  for (int step = 1; step < 8; step *= 2) sum += __shfl_xor_sync(~0u, sum, step);
  if (lane % 8 == 0) shared.coarse[round][threadIdx.x / 8] = sum;
  if (threadIdx.x == 0) shared.found_bin = kNone;
  cluster.sync();
  if (threadIdx.x < 32) {
    const uint32_t most = lane < cluster.size ? cluster.load(&shared.max_key, lane) : 0;
    uint2 high{0, 0}, low{0, 0};  // of the lane's two sums
#pragma unroll 4
    for (int other = 0; other < cluster.size; ++other) {
      const uint2 v = cluster.load(reinterpret_cast<const uint2*>(shared.coarse[round]) + 31 - lane, other);
      const bool is_earlier = other < cluster.rank;
      high = {high.x + v.y, high.y + (is_earlier ? v.y : 0)};
      low = {low.x + v.x, low.y + (is_earlier ? v.x : 0)};
    }
    uint2 above;
    const int found = find_lane({high.x + low.x, high.y + low.y}, {0, 0}, rank, above);
    if (found >= 0) {
      const bool is_low = above.x + high.x < rank;
      const uint2 before{above.x + (is_low ? high.x : 0), above.y + (is_low ? high.y : 0)};
      const uint2 start{__shfl_sync(~0u, before.x, found), __shfl_sync(~0u, before.y, found)};
      const int coarse = kCoarse - 1 - 2 * found - (__shfl_sync(~0u, static_cast<int>(is_low), found) ? 1 : 0);
      const int bin = coarse * kFine + kFine - 1 - lane;
      uint2 counts{0, 0};
#pragma unroll 4
      for (int other = 0; other < cluster.size; ++other) {
        const uint32_t v = cluster.load(&shared.bins[round][bin], other);
        counts = {counts.x + v, counts.y + (other < cluster.rank ? v : 0)};
      }
      if (find_lane(counts, start, rank, above) == lane) {
        shared.found_bin = static_cast<uint32_t>(bin);
        shared.found_above = above.x;
        shared.found_count = counts.x;
        shared.earlier_above = above.y;
        shared.earlier_count = counts.y;
      }
    }
    const uint32_t row_max = __reduce_max_sync(~0u, most);
    if (lane == 0) shared.row_max = row_max;
  }
  __syncthreads();
}

}  // namespace attnops::sparse_indexer
