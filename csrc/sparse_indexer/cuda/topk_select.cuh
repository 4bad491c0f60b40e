#pragma once
#include "sparse_indexer/cuda/stream.cuh"

// Radix selection. A row belongs to a cluster of CTAs, each of which has a share of consecutive keys. A round counts
// keys in 2048 bins of shared memory. All CTAs add up the counts of the cluster, so all know the bin of the k-th key.
// Nothing depends on the order of atomics: counts and sets of bits alone are made by them.
namespace attnops::sparse_indexer {

inline constexpr int kHeld = 8;  // accesses whose keys a thread keeps in registers
inline constexpr int kHeldKeys = kThreads * kVec * kHeld;
inline constexpr int kWords = kHeldKeys / 32;
inline constexpr int kMinShare = 4096;  // keys: a shorter row is divided among fewer CTAs
inline constexpr int kPortableCluster = 8;
inline constexpr int kHeldCtas = 2;  // of a multiprocessor
// The same value, of which the compiler keeps nothing that it has computed: there are no registers for it.
__device__ inline float opaque(float x) {
#if defined(__CUDA_ARCH__)
  asm volatile("" : "+f"(x));
#endif
  return x;
}

inline constexpr int kListed = 4096;  // candidates that a CTA has room for

struct SelectShared {
  Shared shared;
  uint32_t above[kWords], equal[kWords];  // a bit of each key of this CTA
  alignas(16) int32_t staged[kMaxSelected];
  float listed[kListed];     // keys of this CTA that reach the bound, in any order,
  uint16_t places[kListed];  // and where they are among all of it
  uint32_t num_listed;
};
static_assert(kWords == kThreads && kHeldKeys <= 1 << 16);

// A CTA's keys in registers: those that are not the row's are NaN.
struct HeldKeys {
  float x[kHeld][kVec];
  int steps;  // that have keys of this CTA; the same in all threads

  template <typename T>
  __device__ void load(const Share<T>& share) {
    const T* const first = share.base + share.first * kVec;
    const int begin = static_cast<int>(max_of<int64_t>(share.begin - share.first * kVec, 0));
    const int end = static_cast<int>(min_of(share.end, share.last * kVec) - share.first * kVec);
    steps = ceil_div(end, kThreads * kVec);
#pragma unroll
    for (int s = 0; s < kHeld; ++s) {
      const int at = (s * kThreads + static_cast<int>(threadIdx.x)) * kVec;
      if (s >= steps) {
#pragma unroll
        for (int i = 0; i < kVec; ++i) x[s][i] = __int_as_float(0x7FFFFFFF);
      } else if (at >= begin && at + kVec <= end) {
        const auto v = *reinterpret_cast<const RowVec<T, kVec>*>(first + at);
#pragma unroll
        for (int i = 0; i < kVec; ++i) x[s][i] = v.at(i);
      } else {
#pragma unroll
        for (int i = 0; i < kVec; ++i) {
          const bool has = at + i >= begin && at + i < end;
          x[s][i] = has ? static_cast<float>(first[at + i]) : __int_as_float(0x7FFFFFFF);
        }
      }
    }
  }
  template <class Run>
  __device__ void for_each_step(const Run& run) const {
#pragma unroll
    for (int s = 0; s < kHeld; ++s) {
      if (s < steps) run(s, x[s]);
    }
  }
};

// A lower bound of the k-th key, and the bits of the keys' span from there on. The k-th largest of the maxima of groups
// is such a bound, and counting maxima costs a part of counting keys, most of which need no counting then.
__device__ inline void bound_keys(const HeldKeys& held, const Cluster& cluster, int64_t count, SelectShared& s,
                                  Selection& found) {
  const int64_t groups = count / kVec, k = found.rank;
  float most[kHeld];  // of an access
#pragma unroll
  for (int step = 0; step < kHeld; ++step) {
    const float(&x)[kVec] = held.x[step];
    most[step] = fmaxf(fmaxf(x[0], x[1]), fmaxf(x[2], x[3]));
  }
  const auto count_group = [&](float group) { count_in(s.shared.bins[0], key_of(group) >> 21, group == group); };
  const auto merge = [&](int distance) {
#pragma unroll
    for (int step = 0; step < distance; ++step) most[step] = fmaxf(most[step], most[step + distance]);
  };
  if (groups < 4 * k) {
#pragma unroll
    for (int step = 0; step < kHeld; ++step) count_group(most[step]);
  }
  merge(4);
  if (groups >= 4 * k && groups < 8 * k) {
#pragma unroll
    for (int step = 0; step < 4; ++step) count_group(most[step]);
  }
  merge(2);
  if (groups >= 8 * k) count_group(most[0]), count_group(most[1]);
  merge(1);
  const uint32_t max_key = __reduce_max_sync(~0u, most[0] == most[0] ? ordered(most[0]) : 0u);
  if (threadIdx.x % 32 == 0) atomicMax(&s.shared.max_key, max_key);
  find_bin(s.shared, cluster, 0, found.rank);
  if (s.shared.found_bin == kNone) return;
  found.low = max_of(s.shared.found_bin << 21, kLeastKey);
  found.bits = 32 - __clz(s.shared.row_max - found.low);
}

// Lists the keys from `least` on, read again from `first` on: a thread's are found by a set of bits, and registers have
// no index. False: there are too many.
template <typename T>
__device__ inline bool list_keys(const HeldKeys& held, float least, const T* first, SelectShared& s) {
  static_assert(kHeld * kVec == 32);
  const int lane = threadIdx.x % 32, thread = threadIdx.x;
  uint32_t set = 0;
#pragma unroll
  for (int i = 0; i < 32; ++i) set |= held.x[i / kVec][i % kVec] >= least ? 1u << i : 0u;
  const uint32_t mine = __popc(set);
  uint32_t slot = mine;
#pragma unroll
  for (int step = 1; step < 32; step *= 2) {
    const uint32_t other = __shfl_up_sync(~0u, slot, step);
    if (lane >= step) slot += other;
  }
  uint32_t base = 0;
  if (lane == 31) base = atomicAdd(&s.num_listed, slot);
  slot += __shfl_sync(~0u, base, 31) - mine;
  if (slot + mine <= kListed) {
#pragma unroll 1
    for (; set != 0; set &= set - 1) {
      const int i = __ffs(set) - 1;
      s.places[slot++] = static_cast<uint16_t>((i / kVec * kThreads + thread) * kVec + i % kVec);
    }
  }
  __syncthreads();
  if (s.num_listed > kListed) return false;
  // Each key by the thread that asks for it later.
  for (uint32_t i = thread; i < s.num_listed; i += kThreads) s.listed[i] = static_cast<float>(first[s.places[i]]);
  return true;
}

// Calls run(key, place in the CTA) for all keys that may be selected.
template <bool kIsListed, class Run>
__device__ void for_each_candidate(const HeldKeys& held, const SelectShared& s, const Run& run) {
  if constexpr (kIsListed) {
    for (uint32_t i = threadIdx.x; i < s.num_listed; i += kThreads) run(s.listed[i], s.places[i]);
  } else {
    held.for_each_step([&](int step, const float(&x)[kVec]) {
      const int at = (step * kThreads + static_cast<int>(threadIdx.x)) * kVec;
#pragma unroll
      for (int i = 0; i < kVec; ++i) run(opaque(x[i]), at + i);
    });
  }
}

// Rounds until it is known which candidates are selected, and a bit for each that is. False: NaN are among them.
template <bool kIsListed>
__device__ bool mark_selected(const HeldKeys& held, const Cluster& cluster, SelectShared& s, int round,
                              Selection& found) {
  do {
    const int next = max_of(0, found.bits - 11);
    const uint32_t low = found.low, span = found.bits == 32 ? ~0u : (1u << found.bits) - 1;
    const float least = number_of(low);
    uint32_t* const bins = s.shared.bins[round];
    for_each_candidate<kIsListed>(held, s, [&](float x, int) {
      const uint32_t distance = key_of(x) - low;
      count_in(bins, distance >> next, x >= least && distance <= span);
    });
    find_bin(s.shared, cluster, round, found.rank);
    if (s.shared.found_bin == kNone) return false;
    found.narrow(s.shared, next);
    ++round;
  } while (found.bits > 0 && !found.whole);

  const float least = number_of(found.low);
  const bool ties = !found.whole;  // of those equal to the k-th, not all are selected
  for_each_candidate<kIsListed>(held, s, [&](float x, int place) {
    if (x >= least) atomicOr((ties && x == least ? s.equal : s.above) + place / 32, 1u << place % 32);
  });
  __syncthreads();
  return true;
}

// A row whose keys stay in registers. False: NaN are among the selected, and nothing has been written.
template <typename T>
__device__ inline bool select_held(const SelectParams& p, int64_t row, const RowKeys& keys, const HeldKeys& held,
                                   const T* first, int first_position, const Cluster& cluster, SelectShared& s) {
  const int thread = threadIdx.x;
  Selection found{kLeastKey, 32, static_cast<uint32_t>(p.k), false, 0, 0};
  const bool is_long = keys.count >= int64_t{5} * p.k;
  if (is_long) bound_keys(held, cluster, keys.count, s, found);
  const bool listed = is_long && list_keys(held, number_of(found.low), first, s);
  const int round = is_long ? 1 : 0;
  const bool marked = listed ? mark_selected<true>(held, cluster, s, round, found)
                             : mark_selected<false>(held, cluster, s, round, found);
  if (!marked) return false;

  const bool ties = !found.whole;
  const uint32_t before_above = found.above + (ties ? 0 : found.in_bin), before_equal = ties ? found.in_bin : 0;
  const uint32_t wanted = ties ? found.rank : 0;  // of the equal ones
  const uint32_t cta_first = before_above + min_of(before_equal, wanted);
  uint32_t above = s.above[thread], equal = s.equal[thread];
  const uint2 mine{static_cast<uint32_t>(__popc(above)), static_cast<uint32_t>(__popc(equal))};
  uint2 place = sum_before(mine, s.shared.warp_sums);
  place = {place.x + before_above, place.y + before_equal};
  if (thread == kThreads - 1) {
    s.shared.found_count = place.x + mine.x + min_of(place.y + mine.y, wanted) - cta_first;
  }
  for (uint32_t both = above | equal; both != 0; both &= both - 1) {
    const int bit = __ffs(both) - 1;
    const bool is_equal = equal >> bit & 1;
    if (!is_equal || place.y < wanted) {
      s.staged[place.x + min_of(place.y, wanted) - cta_first] = first_position + thread * 32 + bit;
    }
    is_equal ? ++place.y : ++place.x;
  }
  __syncthreads();
  write_positions(p, row, keys.request, s.staged, cta_first, s.shared.found_count, kThreads);
  return true;
}

// Grid: a cluster per row. kStays: the keys of a row stay in registers; else every round reads them again.
template <typename T, bool kStays>
__global__ void __launch_bounds__(kThreads, kHeldCtas) topk_select_kernel(const __grid_constant__ SelectParams p) {
  extern __shared__ __align__(16) uint8_t memory[];
  SelectShared& s = *reinterpret_cast<SelectShared*>(memory);
  const int thread = threadIdx.x;
  Cluster cluster{Cluster::own_rank(), Cluster::launched()};
  const int64_t row = blockIdx.x / cluster.size;
  clear_bins(s.shared);
  s.above[thread] = s.equal[thread] = 0;
  if (thread == 0) {
    s.num_listed = 0;
    make_inbox(s.shared);
  }
  __syncwarp();
  cluster.meet();
  wait_for_earlier_kernels();
  let_next_kernel_start();
  if (p.report != nullptr && cluster.rank == 0 && thread == 0) report_row(p, row);
  const RowKeys keys = keys_of(p, row);

  if (keys.count <= p.k) {  // all of them, whatever they are
    take_all(p, row, keys, cluster.rank * kThreads + thread, cluster.size * kThreads);
    return;
  }
  const int ctas = static_cast<int>(min_of<int64_t>(ceil_div<int64_t>(keys.count, kMinShare), cluster.size));
  if (cluster.rank >= ctas) return;
  cluster.size = ctas;
  if constexpr (kStays) {
    HeldKeys held;
    const Share<T> share(p, row, keys, cluster);
    held.load(share);
    __syncthreads();  // the counts are zero
    const T* const first = share.base + share.first * kVec;
    if (select_held(p, row, keys, held, first, share.position(share.first, 0), cluster, s)) return;
    clear_bins(s.shared);
  }
  __syncthreads();
  select_rereading<T>(p, row, cluster, s.shared, s.staged);
}

}  // namespace attnops::sparse_indexer
