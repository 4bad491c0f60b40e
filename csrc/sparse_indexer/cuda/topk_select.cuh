#pragma once
#include "device/common/pdl.cuh"
#include "device/common/row_vec.cuh"
#include "sparse_indexer/ordered.h"
#include "sparse_indexer/rows.h"

// Radix selection. A row belongs to a cluster of CTAs. Each has a share of consecutive keys, and each warp of a CTA a
// part of that, so places in the output are sums over those before. A pass counts the keys by 11 bits, from the top, in
// shared memory; all CTAs add up the counts of the cluster and so know the bits of the k-th key. Nothing depends on the
// order of atomics: counts alone are made by them.
namespace attnops::sparse_indexer {

inline constexpr int kThreads = 512, kWarps = kThreads / 32;
inline constexpr int kBins = 2048, kPasses = 3;
inline constexpr int kVec = 4;   // keys of one access
inline constexpr int kHeld = 8;  // accesses whose keys a thread keeps in registers
inline constexpr int kHeldKeys = kThreads * kVec * kHeld;
inline constexpr int kMinShare = 4096;  // keys: a shorter row is divided among fewer CTAs
inline constexpr int kPortableCluster = 8;

struct Totals {
  uint32_t above, equal;
};

struct Shared {
  uint32_t bins[kPasses][kBins];
  Totals warps[kWarps];
  Totals mine;  // of this CTA, for those after it
  uint32_t warp_sums[kWarps];
  uint32_t found_bin, found_above, found_count;
};

// CTAs of a row. Before Hopper there is one.
struct Cluster {
  int rank, size;

#if __CUDA_ARCH__ >= 900
  __device__ static int own_rank() {
    uint32_t rank;
    asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
    return static_cast<int>(rank);
  }
  __device__ static int launched() {
    uint32_t size;
    asm volatile("mov.u32 %0, %%cluster_nctarank;" : "=r"(size));
    return static_cast<int>(size);
  }
  __device__ void arrive() const {
    if (size > 1) asm volatile("barrier.cluster.arrive.release;" ::: "memory");
  }
  __device__ void wait() const {
    if (size > 1) asm volatile("barrier.cluster.wait.acquire;" ::: "memory");
  }
  // Threads that have ended count as arrived.
  __device__ void sync() const {
    if (size == 1) return __syncthreads();
    arrive();
    wait();
  }
  template <typename T>
  __device__ uint32_t address(const T* local, int other) const {
    uint32_t remote;
    const uint32_t own = static_cast<uint32_t>(__cvta_generic_to_shared(local));
    asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(remote) : "r"(own), "r"(other));
    return remote;
  }
  __device__ uint4 load(const uint4* local, int other) const {
    uint4 v;
    asm volatile("ld.shared::cluster.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                 : "r"(address(local, other))
                 : "memory");
    return v;
  }
  __device__ Totals load(const Totals* local, int other) const {
    Totals v;
    asm volatile("ld.shared::cluster.v2.u32 {%0, %1}, [%2];"
                 : "=r"(v.above), "=r"(v.equal)
                 : "r"(address(local, other))
                 : "memory");
    return v;
  }
#else
  __device__ static int own_rank() { return 0; }
  __device__ static int launched() { return 1; }
  __device__ void arrive() const {}
  __device__ void wait() const {}
  __device__ void sync() const { __syncthreads(); }
  __device__ uint4 load(const uint4* local, int) const { return *local; }
  __device__ Totals load(const Totals* local, int) const { return *local; }
#endif
};

// A warp's part of a row: accesses of 32 lanes, `steps` of them, from access `first` on. Accesses start at multiples of
// kVec elements of memory, so the row begins `skip` elements into access 0.
template <typename T>
struct Part {
  const T* base;        // where access 0 lies, up to kVec - 1 elements before the row
  int64_t begin, end;   // elements from base on that are the row's
  int64_t first, last;  // accesses of this warp: [first, last)

  // Keys of access `first + step * 32 + lane`: 0 where the row has none.
  __device__ void load(int64_t step, int lane, uint32_t (&keys)[kVec]) const {
    const int64_t access = first + step * 32 + lane, at = access * kVec;
    if (access < last && at >= begin && at + kVec <= end) {
      const auto v = *reinterpret_cast<const RowVec<T, kVec>*>(base + at);
#pragma unroll
      for (int i = 0; i < kVec; ++i) keys[i] = ordered(v.at(i));
    } else {
#pragma unroll
      for (int i = 0; i < kVec; ++i) {
        keys[i] = access < last && at + i >= begin && at + i < end ? ordered(static_cast<float>(base[at + i])) : 0;
      }
    }
  }
};

// Finds, from the counts of all CTAs, the bin that holds the key of rank `rank` from the top.
// Leaves it in shared.found_*: the bin, the keys above it and those in it.
__device__ inline void find_bin(Shared& shared, const Cluster& cluster, int pass, uint32_t rank) {
  constexpr int kPer = kBins / kThreads;
  static_assert(kPer == 4);
  const int thread = threadIdx.x, lane = thread % 32, warp = thread / 32;
  const int from_top = kThreads - 1 - thread;  // thread 0 has the highest bins
  uint4 sum = make_uint4(0, 0, 0, 0);
  for (int other = 0; other < cluster.size; ++other) {
    const uint4 v = cluster.load(reinterpret_cast<const uint4*>(shared.bins[pass]) + from_top, other);
    sum.x += v.x;
    sum.y += v.y;
    sum.z += v.z;
    sum.w += v.w;
  }
  const uint32_t counts[kPer] = {sum.w, sum.z, sum.y, sum.x};
  const uint32_t mine = sum.x + sum.y + sum.z + sum.w;
  uint32_t inclusive = mine;
#pragma unroll
  for (int step = 1; step < 32; step *= 2) {
    const uint32_t other = __shfl_up_sync(~0u, inclusive, step);
    if (lane >= step) inclusive += other;
  }
  if (lane == 31) shared.warp_sums[warp] = inclusive;
  __syncthreads();
  uint32_t before = 0;
#pragma unroll
  for (int w = 0; w < kWarps; ++w) before += w < warp ? shared.warp_sums[w] : 0;
  uint32_t above = before + inclusive - mine;
  if (above < rank && above + mine >= rank) {
#pragma unroll
    for (int i = 0; i < kPer; ++i) {
      if (above < rank && above + counts[i] >= rank) {
        shared.found_bin = static_cast<uint32_t>(from_top * kPer + kPer - 1 - i);
        shared.found_above = above;
        shared.found_count = counts[i];
      }
      above += counts[i];
    }
  }
  __syncthreads();
}

// Grid: a cluster per row. kStays: a thread keeps its keys in registers; else every pass reads them again.
template <typename T, bool kStays>
__global__ void __launch_bounds__(kThreads, 2) topk_select_kernel(const __grid_constant__ SelectParams p) {
  __shared__ Shared shared;
  const int thread = threadIdx.x, lane = thread % 32, warp = thread / 32;
  Cluster cluster{Cluster::own_rank(), Cluster::launched()};
  const int64_t row = blockIdx.x / cluster.size;
  for (int i = thread; i < kPasses * kBins / 4; i += kThreads) {
    reinterpret_cast<uint4*>(shared.bins)[i] = make_uint4(0, 0, 0, 0);
  }
  wait_for_earlier_kernels();
  let_next_kernel_start();
  if (p.report != nullptr && cluster.rank == 0 && thread == 0) report_row(p, row);
  const RowKeys keys = keys_of(p, row);
  int32_t* const indices = p.indices + row * p.stride_indices;
  int32_t* const positions = p.positions != nullptr ? p.positions + row * p.stride_positions : nullptr;

  if (keys.count <= p.k) {  // all of them, whatever they are
    for (int i = cluster.rank * kThreads + thread; i < p.k; i += cluster.size * kThreads) {
      const bool is_key = i < keys.count;
      indices[i] = is_key ? index_of(p, row, keys.request, i) : -1;
      if (positions != nullptr) positions[i] = is_key ? i : -1;
    }
    return;
  }
  const int64_t wanted_ctas = ceil_div<int64_t>(keys.count, kMinShare);
  const int ctas = static_cast<int>(min_of<int64_t>(wanted_ctas, cluster.size));
  if (cluster.rank >= ctas) return;
  cluster.size = ctas;

  const T* const begin = static_cast<const T*>(p.logits) + row * p.stride_row + keys.start;
  const int64_t skip = static_cast<int64_t>(reinterpret_cast<uintptr_t>(begin) / sizeof(T) % kVec);
  const int64_t accesses = ceil_div(skip + keys.count, int64_t{kVec});
  const int64_t per_warp = round_up(ceil_div(accesses, int64_t{ctas} * kWarps), int64_t{32});
  Part<T> part{begin - skip, skip, skip + keys.count, 0, 0};
  part.first = min_of(accesses, (cluster.rank * int64_t{kWarps} + warp) * per_warp);
  part.last = min_of(accesses, part.first + per_warp);
  const int64_t steps = ceil_div(part.last - part.first, int64_t{32});  // the same in all lanes

  uint32_t held[kStays ? kHeld : 1][kVec];
  if constexpr (kStays) {
#pragma unroll
    for (int s = 0; s < kHeld; ++s) {
      if (s < steps) {
        part.load(s, lane, held[s]);
      } else {
#pragma unroll
        for (int i = 0; i < kVec; ++i) held[s][i] = 0;
      }
    }
  }

  __syncthreads();  // the counts are zero

  const auto for_each_step = [&](const auto& run) {
    if constexpr (kStays) {
#pragma unroll
      for (int s = 0; s < kHeld; ++s) {
        if (s < steps) run(s, held[s]);
      }
    } else {
      for (int64_t s = 0; s < steps; ++s) {
        part.load(s, lane, held[0]);
        run(s, held[0]);
      }
    }
  };

  // `low` is the least key that has the bits found so far, `rank` the k-th key's among those that have them.
  constexpr int kShifts[kPasses] = {21, 10, 0};
  constexpr int kUsed = sizeof(T) == 2 ? 2 : 3;  // a bfloat16 has no bits for the last pass
  uint32_t low = 0, rank = static_cast<uint32_t>(p.k), count = 0;
  int shift = 32;
#pragma unroll
  for (int pass = 0; pass < kUsed; ++pass) {
    const int next = kShifts[pass];
    const uint32_t mask = (1u << (shift - next)) - 1;
    for_each_step([&](int64_t, const uint32_t(&key)[kVec]) {
#pragma unroll
      for (int i = 0; i < kVec; ++i) {
        const bool counts = key[i] != 0 && (pass == 0 || key[i] >> shift == low >> shift);
        if (counts) atomicAdd(&shared.bins[pass][key[i] >> next & mask], 1u);
      }
    });
    cluster.sync();
    find_bin(shared, cluster, pass, rank);
    low |= shared.found_bin << next;
    rank -= shared.found_above;
    count = shared.found_count;
    shift = next;
    if (count == rank) break;  // all keys of the bin are selected
  }
  // Selected are the keys above the bin, and `rank` of those in it, the first ones.
  const uint32_t bin = low >> shift;

  uint32_t above = 0, equal = 0;
  for_each_step([&](int64_t, const uint32_t(&key)[kVec]) {
#pragma unroll
    for (int i = 0; i < kVec; ++i) {
      above += key[i] >> shift > bin;
      equal += key[i] >> shift == bin && key[i] != 0;
    }
  });
  above = __reduce_add_sync(~0u, above);
  equal = __reduce_add_sync(~0u, equal);
  if (lane == 0) shared.warps[warp] = {above, equal};
  __syncthreads();
  if (warp == 0) {
    const Totals t = lane < kWarps ? shared.warps[lane] : Totals{0, 0};
    const uint32_t all_above = __reduce_add_sync(~0u, t.above), all_equal = __reduce_add_sync(~0u, t.equal);
    if (lane == 0) shared.mine = {all_above, all_equal};
  }
  cluster.sync();
  // Keys before this warp's, and selected ones before this CTA's and up to its end.
  Totals earlier{0, 0}, t{0, 0};
  if (lane < cluster.rank) earlier = cluster.load(&shared.mine, lane);
  if (lane < warp) t = shared.warps[lane];
  const uint32_t cta_above = __reduce_add_sync(~0u, earlier.above), cta_equal = __reduce_add_sync(~0u, earlier.equal);
  uint32_t before_above = cta_above + __reduce_add_sync(~0u, t.above);
  uint32_t before_equal = cta_equal + __reduce_add_sync(~0u, t.equal);
  const uint32_t cta_first = cta_above + min_of(cta_equal, rank);
  const uint32_t cta_last = cta_above + shared.mine.above + min_of(cta_equal + shared.mine.equal, rank);
  cluster.arrive();  // no CTA ends while others may read its totals

  // The counts are of no more use: their memory takes the positions, so that writes are coalesced.
  int32_t* const staged = reinterpret_cast<int32_t*>(shared.bins);
  const uint32_t lower_lanes = (1u << lane) - 1;
  for_each_step([&](int64_t step, const uint32_t(&key)[kVec]) {
    uint32_t above_before = 0, above_all = 0, equal_before = 0, equal_all = 0;
    bool any_equal = false;
#pragma unroll
    for (int i = 0; i < kVec; ++i) {
      const uint32_t votes = __ballot_sync(~0u, key[i] >> shift > bin);
      above_before += __popc(votes & lower_lanes);
      above_all += __popc(votes);
      any_equal |= key[i] >> shift == bin && key[i] != 0;
    }
    if (__any_sync(~0u, any_equal)) {
#pragma unroll
      for (int i = 0; i < kVec; ++i) {
        const uint32_t votes = __ballot_sync(~0u, key[i] >> shift == bin && key[i] != 0);
        equal_before += __popc(votes & lower_lanes);
        equal_all += __popc(votes);
      }
    }
    if (above_all + equal_all == 0) return;
    uint32_t place_above = before_above + above_before, place_equal = before_equal + equal_before;
    const int position = static_cast<int>((part.first + step * 32 + lane) * kVec - part.begin);
#pragma unroll
    for (int i = 0; i < kVec; ++i) {
      const bool is_above = key[i] >> shift > bin, is_equal = key[i] >> shift == bin && key[i] != 0;
      if (is_above || (is_equal && place_equal < rank)) {
        staged[place_above + min_of(place_equal, rank) - cta_first] = position + i;
      }
      place_above += is_above;
      place_equal += is_equal;
    }
    before_above += above_all;
    before_equal += equal_all;
  });
  __syncthreads();
  for (uint32_t place = cta_first + thread; place < cta_last; place += kThreads) {
    const int position = staged[place - cta_first];
    indices[place] = index_of(p, row, keys.request, position);
    if (positions != nullptr) positions[place] = position;
  }
  cluster.wait();
}

}  // namespace attnops::sparse_indexer
