#pragma once
#include "device/common/row_vec.cuh"
#include "sparse_indexer/cuda/find_bin.cuh"
#include "sparse_indexer/cuda/outputs.cuh"
#include "sparse_indexer/ordered.h"

namespace attnops::sparse_indexer {

inline constexpr int kVec = 4;                        // keys of one access
inline constexpr uint32_t kLeastKey = 0x007FFFFF;     // of -inf, the least that is a number
inline constexpr uint32_t kGreatestKey = 0xFF800000;  // of inf

// As ordered() has it, of a number.
__device__ inline uint32_t key_of(float x) {
  const uint32_t bits = __float_as_uint(x + 0.f);  // -0 becomes 0
  return bits ^ (static_cast<uint32_t>(static_cast<int32_t>(bits) >> 31) | 0x80000000u);
}

// The float whose key this is; no number above that of infinity.
__device__ inline float number_of(uint32_t key) {
  return __uint_as_float(key & 0x80000000u ? key ^ 0x80000000u : ~key);
}

// The share of a CTA in a row. Accesses start at multiples of kVec elements of memory, so the row may begin within
// the first.
template <typename T>
struct Share {
  const T* base;        // where access 0 lies, up to kVec - 1 elements before the row
  int64_t begin, end;   // elements from base on that are the row's
  int64_t first, last;  // accesses of this CTA: [first, last)

  __device__ Share(const SelectParams& p, int64_t row, const RowKeys& keys, const Cluster& cluster) {
    const T* const logits = static_cast<const T*>(p.logits) + row * p.stride_row + keys.start;
    begin = static_cast<int64_t>(reinterpret_cast<uintptr_t>(logits) / sizeof(T) % kVec);
    base = logits - begin;
    end = begin + keys.count;
    const int64_t accesses = ceil_div(end, int64_t{kVec});
    const int64_t each = ceil_div(accesses, int64_t{cluster.size});
    first = min_of(accesses, each * cluster.rank);
    last = min_of(accesses, first + each);
  }

  // The logits of an access: NaN where the row has none. True: it lies within the row.
  __device__ void load(int64_t access, float (&x)[kVec]) const {
    const int64_t at = access * kVec;
    if (access < last && at >= begin && at + kVec <= end) {
      const auto v = *reinterpret_cast<const RowVec<T, kVec>*>(base + at);
#pragma unroll
      for (int i = 0; i < kVec; ++i) x[i] = v.at(i);
    } else {
#pragma unroll
      for (int i = 0; i < kVec; ++i) {
        x[i] = has(access, i) ? static_cast<float>(base[at + i]) : __int_as_float(0x7FFFFFFF);
      }
    }
  }
  __device__ bool has(int64_t access, int i) const {
    return access < last && access * kVec + i >= begin && access * kVec + i < end;
  }
  __device__ int position(int64_t access, int i) const { return static_cast<int>(access * kVec + i - begin); }
};

// Which keys of a row are selected, and where this CTA's stand among them.
struct Selection {
  uint32_t low;            // least key of the bin that the k-th key is in
  int bits;                // the bin has keys below low + 2^bits
  uint32_t rank;           // keys of the bin that are selected, the first ones
  bool whole;              // those are all of it
  uint32_t above, in_bin;  // of the CTAs before this one: keys above the bin, and in it

  // After find_bin: the bin that it found, of 2^next keys.
  __device__ void narrow(const Shared& shared, int next) {
    low += shared.found_bin << next;
    rank -= shared.found_above;
    above += shared.earlier_above;
    in_bin = shared.earlier_count;
    bits = next;
    whole = shared.found_count == rank;
  }
};

// Any row: each round reads it again, and so do the last two passes. Counts are zero at the start. A function of its
// own, so that a row in registers keeps nothing for it.
template <typename T>
__device__ __noinline__ void select_rereading(const SelectParams& p, int64_t row, const Cluster& cluster,
                                              Shared& shared, int32_t* staged) {
  const RowKeys keys = keys_of(p, row);
  const Share<T> share(p, row, keys, cluster);
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  // A warp has accesses side by side, so places are sums over the warps before.
  const int64_t each = round_up(ceil_div(share.last - share.first, int64_t{kWarps}), int64_t{32});
  const int64_t first = min_of(share.last, share.first + warp * each), last = min_of(share.last, first + each);
  const auto for_each_access = [&](const auto& run) {
    for (int64_t access = first + lane; access - lane < last; access += 32) {
      float x[kVec];
      share.load(access < last ? access : share.last, x);
      uint32_t keys[kVec];  // 0 where the row has none
#pragma unroll
      for (int i = 0; i < kVec; ++i) keys[i] = access < last && share.has(access, i) ? ordered(x[i]) : 0;
      run(access, keys);
    }
  };

  Selection s{0, 32, static_cast<uint32_t>(p.k), false, 0, 0};
  for (int round = 0; s.bits > 0 && !s.whole; ++round) {
    const int next = max_of(0, s.bits - 11);
    const uint32_t span = s.bits == 32 ? ~0u : (1u << s.bits) - 1;
    for_each_access([&](int64_t, const uint32_t(&keys)[kVec]) {
#pragma unroll
      for (int i = 0; i < kVec; ++i) {
        if (keys[i] != 0 && keys[i] >= s.low && keys[i] - s.low <= span) {
          atomicAdd(&shared.bins[round][(keys[i] - s.low) >> next], 1u);
        }
      }
    });
    find_bin(shared, cluster, round, s.rank);
    s.narrow(shared, next);
  }
  const uint32_t low = max_of(s.low, 1u), span = (1u << s.bits) - 1;
  uint2 mine{0, 0};  // keys above the bin, and in it
  for_each_access([&](int64_t, const uint32_t(&keys)[kVec]) {
#pragma unroll
    for (int i = 0; i < kVec; ++i) {
      if (keys[i] >= low) keys[i] - s.low > span ? ++mine.x : ++mine.y;
    }
  });
  mine = {__reduce_add_sync(~0u, mine.x), __reduce_add_sync(~0u, mine.y)};
  const uint2 before = sum_before(lane == 0 ? mine : make_uint2(0, 0), shared.warp_sums);
  uint2 place{__shfl_sync(~0u, before.x, 0), __shfl_sync(~0u, before.y, 0)};
  const uint32_t cta_first = s.above + min_of(s.in_bin, s.rank);
  place = {place.x + s.above, place.y + s.in_bin};
  if (threadIdx.x == kThreads - 1) {
    // Its warp is the last: what stands before it and in it is all of this CTA.
    shared.found_count = place.x + mine.x + min_of(place.y + mine.y, s.rank) - cta_first;
  }
  for_each_access([&](int64_t access, const uint32_t(&keys)[kVec]) {
    uint2 own{0, 0};
#pragma unroll
    for (int i = 0; i < kVec; ++i) {
      if (keys[i] >= low) keys[i] - s.low > span ? ++own.x : ++own.y;
    }
    if (!__any_sync(~0u, (own.x | own.y) != 0)) return;
    uint2 inclusive = own;
#pragma unroll
    for (int step = 1; step < 32; step *= 2) {
      const uint32_t x = __shfl_up_sync(~0u, inclusive.x, step), y = __shfl_up_sync(~0u, inclusive.y, step);
      if (lane >= step) inclusive = {inclusive.x + x, inclusive.y + y};
    }
    uint2 at{place.x + inclusive.x - own.x, place.y + inclusive.y - own.y};
#pragma unroll
    for (int i = 0; i < kVec; ++i) {
      if (keys[i] < low) continue;
      const bool is_above = keys[i] - s.low > span;
      if (is_above || at.y < s.rank) staged[at.x + min_of(at.y, s.rank) - cta_first] = share.position(access, i);
      is_above ? ++at.x : ++at.y;
    }
    place = {place.x + __shfl_sync(~0u, inclusive.x, 31), place.y + __shfl_sync(~0u, inclusive.y, 31)};
  });
  __syncthreads();
  write_positions(p, row, keys.request, staged, cta_first, shared.found_count, kThreads);
}

}  // namespace attnops::sparse_indexer
