#pragma once
#include "sparse_indexer/cuda/row_cluster.cuh"

namespace attnops::sparse_indexer {

inline constexpr int kThreads = 512, kWarps = kThreads / 32;
inline constexpr int kBins = 2048, kRounds = 4;
inline constexpr int kFine = 32, kCoarse = kBins / kFine;  // bins that count as one at first
inline constexpr int kMostCtas = 8;                        // of a row
inline constexpr uint32_t kNone = ~0u;

// What each CTA of a row has sent to this one, in two letters a round. All have read the one before when they send the
// next, for each needs all others' other letter first.
struct Inbox {
  uint32_t coarse[kMostCtas][kCoarse];  // sums of 32 bins
  uint32_t fine[kMostCtas][kFine];      // the bins of one of those
  uint32_t most[kMostCtas];             // the largest key, with the sums
  uint64_t coarse_full, fine_full;      // barriers
  uint32_t parity;                      // of both, in the round to come
};

struct Shared {
  uint32_t bins[kRounds][kBins];
  Inbox inbox;
  uint2 warp_sums[kWarps];
  // What find_bin finds.
  uint32_t found_bin, found_above, found_count;  // of the whole row
  uint32_t earlier_above, earlier_count;         // of the CTAs before this one
  uint32_t max_key, row_max;                     // of this CTA, and of all
};

// Adds one to a bin where `counts`. The address in shared memory is made once, and nothing branches.
__device__ inline void count_in(uint32_t* bins, uint32_t bin, bool counts) {
#if defined(__CUDA_ARCH__)
  asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %1, 0;\n@p red.shared.add.u32 [%0], 1;\n}\n" ::"r"(
                   static_cast<uint32_t>(__cvta_generic_to_shared(bins)) + 4 * bin),
               "r"(static_cast<int>(counts))
               : "memory");
#else
  if (counts) atomicAdd(bins + bin, 1u);
#endif
}

__device__ inline void clear_bins(Shared& shared) {
  for (int i = threadIdx.x; i < kRounds * kBins / 4; i += kThreads) {
    reinterpret_cast<uint4*>(shared.bins)[i] = make_uint4(0, 0, 0, 0);
  }
  if (threadIdx.x == 0) shared.max_key = 0;
}

// By one thread.
__device__ inline void make_inbox(Shared& shared) {
  shared.inbox.parity = 0;
  Cluster::make(&shared.inbox.coarse_full, &shared.inbox.fine_full);
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

// Where the key of rank `rank` from the top is, counted from 1, among the bins of the lanes, lane 0 the highest; -1
// where none has it. Counts are of all CTAs, and of those before this one. `above` becomes what is above the lane's
// bin; of the CTAs before, above that with the key.
__device__ inline int find_lane(uint2 counts, uint32_t rank, uint2& above) {
  const int lane = threadIdx.x % 32;
  uint32_t inclusive = counts.x;
#pragma unroll
  for (int step = 1; step < 32; step *= 2) {
    const uint32_t x = __shfl_up_sync(~0u, inclusive, step);
    if (lane >= step) inclusive += x;
  }
  const uint32_t first = above.x + inclusive - counts.x;
  const int found = __ffs(__ballot_sync(~0u, first < rank && first + counts.x >= rank)) - 1;
  above = {first, above.y + __reduce_add_sync(~0u, lane < found ? counts.y : 0u)};
  return found;
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

// Where a row has more: by one warp, once all warps have sent their sums.
__device__ inline void find_common_bin(Shared& shared, const Cluster& cluster, int round, uint32_t rank) {
  Inbox& inbox = shared.inbox;
  const int lane = threadIdx.x % 32;
  if (lane < cluster.size) {
    cluster.send(&inbox.most[cluster.rank], shared.max_key, &inbox.coarse_full, lane);
  }
  if (lane == 0) cluster.expect(&inbox.coarse_full, cluster.size * (kCoarse + 1) * 4);
  const uint32_t parity = inbox.parity;
  cluster.await(&inbox.coarse_full, parity);
  const uint32_t row_max = __reduce_max_sync(~0u, lane < cluster.size ? inbox.most[lane] : 0);
  uint2 high{0, 0}, low{0, 0};  // of the lane's two sums
#pragma unroll 2
  for (int other = 0; other < cluster.size; ++other) {
    const uint2 v = reinterpret_cast<const uint2*>(inbox.coarse[other])[31 - lane];
    const bool is_earlier = other < cluster.rank;
    high = {high.x + v.y, high.y + (is_earlier ? v.y : 0)};
    low = {low.x + v.x, low.y + (is_earlier ? v.x : 0)};
  }
  uint2 above{0, 0};
  const int found = find_lane({high.x + low.x, high.y + low.y}, rank, above);
  const bool is_low = above.x + high.x < rank;
  const bool takes_low = __shfl_sync(~0u, static_cast<int>(is_low), found) != 0;
  above = {__shfl_sync(~0u, above.x + (is_low ? high.x : 0), found),
           above.y + (takes_low ? __shfl_sync(~0u, high.y, found) : 0)};
  // Where there is none the second letter is sent, too, or a next first one might come too early.
  const int coarse = found < 0 ? 0 : kCoarse - 1 - 2 * found - (takes_low ? 1 : 0);

  const int vec = lane % 8;  // eight lanes send the 32 bins
  const uint4 own = reinterpret_cast<const uint4*>(shared.bins[round])[coarse * (kFine / 4) + vec];
#pragma unroll 1
  for (int other = lane / 8; other < cluster.size; other += 4) {
    cluster.send(&inbox.fine[cluster.rank][4 * vec], own, &inbox.fine_full, other);
  }
  if (lane == 0) cluster.expect(&inbox.fine_full, cluster.size * kFine * 4);
  cluster.await(&inbox.fine_full, parity);
  uint2 counts{0, 0};
#pragma unroll 2
  for (int other = 0; other < cluster.size; ++other) {
    const uint32_t v = inbox.fine[other][kFine - 1 - lane];
    counts = {counts.x + v, counts.y + (other < cluster.rank ? v : 0)};
  }
  const int at = find_lane(counts, rank, above);
  __syncwarp();  // all lanes have read the parity
  if (lane == 0) {
    inbox.parity = parity ^ 1;
    shared.row_max = row_max;
    if (found < 0) shared.found_bin = kNone;
  }
  if (found >= 0 && at == lane) {
    shared.found_bin = static_cast<uint32_t>(coarse * kFine + kFine - 1 - lane);
    shared.found_above = above.x;
    shared.found_count = counts.x;
    shared.earlier_above = above.y;
    shared.earlier_count = counts.y;
  }
}

// Finds, from the counts of all CTAs, the bin with the key of rank `rank` from the top, counted from 1. found_bin is
// kNone where there are fewer keys.
__device__ inline void find_bin(Shared& shared, const Cluster& cluster, int round, uint32_t rank) {
  static_assert(kBins == 4 * kThreads && kCoarse == 4 * kWarps);
  __syncthreads();
  if (cluster.size == 1) return find_own_bin(shared, round, rank);
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const uint4 own = reinterpret_cast<const uint4*>(shared.bins[round])[threadIdx.x];
  uint32_t sum = own.x + own.y + own.z + own.w;
#pragma unroll
  for (int step = 1; step < 8; step *= 2) sum += __shfl_xor_sync(~0u, sum, step);
  const uint4 sums{__shfl_sync(~0u, sum, 0), __shfl_sync(~0u, sum, 8), __shfl_sync(~0u, sum, 16),
                   __shfl_sync(~0u, sum, 24)};
  if (lane < cluster.size) {
    cluster.send(&shared.inbox.coarse[cluster.rank][4 * warp], sums, &shared.inbox.coarse_full, lane);
  }
  if (warp == 0) find_common_bin(shared, cluster, round, rank);
  __syncthreads();
}

}  // namespace attnops::sparse_indexer
