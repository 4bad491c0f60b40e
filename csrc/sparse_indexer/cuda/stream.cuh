#pragma once
#include "sparse_indexer/cuda/reread.cuh"

// Selection of many long rows: a CTA a row, and three on a multiprocessor, so that some wait for memory while others
// count. Keys are read twice, the second time from L2: for a bound, which the k-th of the maxima of groups is, and for
// the keys from there on. The rest is done with a list of these. Rows of few more than k keys have no such bound, and
// of some the list has no room: all their keys from the bound on are counted, which gives a better one.
namespace attnops::sparse_indexer {

inline constexpr int kStreamCtas = 3;
inline constexpr int kStreamListed = 4096;       // keys that a list has room for
inline constexpr int kLeastStreamed = 8192 + 1;  // columns
inline constexpr int kMostStreamed = 1 << 17;    // columns: a bit of each
inline constexpr int kAtOnce = 4;                // accesses of a thread that are on their way

struct StreamShared {
  Shared shared;                            // in the end its bins are bits of keys
  alignas(16) float listed[kStreamListed];  // in any order; in the end positions
  int32_t places[kStreamListed];            // where they are in the row
  uint32_t num_listed[2];                   // of the first try, and of the second

  __device__ uint32_t* above() { return shared.bins[0]; }
  __device__ uint32_t* equal() { return shared.bins[2]; }
};
static_assert(2 * kBins * 32 == kMostStreamed && kStreamListed >= kMaxSelected);

// A row of fewer than 2^17 keys, by accesses that start at multiples of kVec elements of memory.
template <typename T>
struct StreamRow {
  const T* base;   // where access 0 lies, up to kVec - 1 elements before the row
  int begin, end;  // elements from base on that are the row's

  __device__ explicit StreamRow(const Share<T>& share)
      : base(share.base), begin(static_cast<int>(share.begin)), end(static_cast<int>(share.end)) {}

  // NaN where the row has no key.
  __device__ void load(int at, float (&x)[kVec]) const {
    if (at >= begin && at + kVec <= end) return load_whole(at, x);
#pragma unroll
    for (int i = 0; i < kVec; ++i) {
      const bool has = at + i >= begin && at + i < end;
      x[i] = has ? static_cast<float>(base[at + i]) : __int_as_float(0x7FFFFFFF);
    }
  }
  __device__ void load_whole(int at, float (&x)[kVec]) const {
    const auto v = *reinterpret_cast<const RowVec<T, kVec>*>(base + at);
#pragma unroll
    for (int i = 0; i < kVec; ++i) x[i] = v.at(i);
  }

  // Calls run(x) for kAtOnce accesses of this thread, which are kStride keys apart, until the row ends. All threads
  // call it the same number of times.
  static constexpr int kStride = kThreads * kVec;
  template <class Run>
  __device__ void for_each(const Run& run) const {
#pragma unroll 1
    for (int first = 0; first < end; first += kAtOnce * kStride) {
      float x[kAtOnce][kVec];
      const int at = first + static_cast<int>(threadIdx.x) * kVec;
      if (first >= begin && first + kAtOnce * kStride <= end) {
#pragma unroll
        for (int s = 0; s < kAtOnce; ++s) load_whole(at + s * kStride, x[s]);
      } else {
#pragma unroll
        for (int s = 0; s < kAtOnce; ++s) load(at + s * kStride, x[s]);
      }
      run(x);
    }
  }
};

// A lower bound of the k-th key, and the bits of the keys' span from there on. False: there are too few numbers.
template <typename T>
__device__ inline bool bound_row(const StreamRow<T>& row, int count, StreamShared& s, Selection& found) {
  static_assert(kAtOnce == 4);
  const int k = static_cast<int>(found.rank), groups = count / kVec;
  int of_group = 1;  // accesses; at least 2 k groups remain, or all
  while (groups / of_group >= 4 * k) of_group *= 2;
  float most = __int_as_float(0x7FFFFFFF), highest = most;
  int seen = 0;
  const auto count_group = [&](float group) {
    if (group == group) atomicAdd(&s.shared.bins[0][ordered(group) >> 21], 1u);
  };
  row.for_each([&](const float(&x)[kAtOnce][kVec]) {
    float group[kAtOnce];
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) group[i] = fmaxf(fmaxf(x[i][0], x[i][1]), fmaxf(x[i][2], x[i][3]));
    if (of_group == 1) {
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) count_group(group[i]);
    }
    group[0] = fmaxf(group[0], group[1]), group[2] = fmaxf(group[2], group[3]);
    if (of_group == 2) count_group(group[0]), count_group(group[2]);
    group[0] = fmaxf(group[0], group[2]);
    highest = fmaxf(highest, group[0]);
    if (of_group < kAtOnce) return;
    most = fmaxf(most, group[0]);
    seen += kAtOnce;
    if (seen == of_group) count_group(most), most = __int_as_float(0x7FFFFFFF), seen = 0;
  });
  count_group(most);
  const uint32_t max_key = __reduce_max_sync(~0u, highest == highest ? ordered(highest) : 0u);
  if (threadIdx.x % 32 == 0) atomicMax(&s.shared.max_key, max_key);
  find_bin(s.shared, Cluster{0, 1}, 0, found.rank);
  if (s.shared.found_bin == kNone) return false;
  found.low = max_of(s.shared.found_bin << 21, kLeastKey);
  found.bits = 32 - __clz(s.shared.row_max - found.low);
  return true;
}

// Lists the keys from `least` on: a set of bits for the keys that a thread has of a batch, and then, of those in the
// set, where they are; keys themselves are read again, for registers have no index. False: there are too many.
template <typename T>
__device__ inline bool list_row(const StreamRow<T>& row, float least, StreamShared& s, uint32_t& num_listed) {
  constexpr int kKeys = kAtOnce * kVec, kBatch = kThreads * kKeys, kRead = 4;
  const int thread = threadIdx.x, lane = thread % 32;
  int batch = thread * kKeys;
  row.for_each([&](const float(&x)[kAtOnce][kVec]) {
    const int own = batch;
    batch += kBatch;
    uint32_t set = 0;
#pragma unroll
    for (int i = 0; i < kKeys; ++i) {
      if (x[i / kVec][i % kVec] >= least) set |= 1u << i;
    }
    if (!__any_sync(~0u, set != 0)) return;
    const uint32_t mine = __popc(set);
    uint32_t slot = mine;
#pragma unroll
    for (int step = 1; step < 32; step *= 2) {
      const uint32_t other = __shfl_up_sync(~0u, slot, step);
      if (lane >= step) slot += other;
    }
    uint32_t base = 0;
    if (lane == 31) base = atomicAdd(&num_listed, slot);
    slot += __shfl_sync(~0u, base, 31) - mine;
    if (slot + mine > kStreamListed) return;
#pragma unroll 1
    while (set != 0) {
      const int i = 31 - __clz(set);
      set ^= 1u << i;
      s.places[slot++] = own + i;
    }
  });
  __syncthreads();
  const auto listed = static_cast<int>(num_listed);
  if (listed > kStreamListed) return false;
  // Each key by the thread that asks for it later.
  for (int first = thread; first < listed; first += kRead * kThreads) {
    int at[kRead];
    float x[kRead];
#pragma unroll
    for (int i = 0; i < kRead; ++i) {
      if (first + i * kThreads >= listed) continue;
      const int place = s.places[first + i * kThreads], of_thread = place % kKeys;
      at[i] = place / kBatch * kBatch + of_thread / kVec * StreamRow<T>::kStride + place % kBatch / kKeys * kVec +
              of_thread % kVec;
      x[i] = static_cast<float>(row.base[at[i]]);
    }
#pragma unroll
    for (int i = 0; i < kRead; ++i) {
      if (first + i * kThreads >= listed) continue;
      s.listed[first + i * kThreads] = x[i];
      s.places[first + i * kThreads] = at[i] - row.begin;
    }
  }
  return true;
}

// A round: counts the keys that for_each_key(run) calls run(key) for. False: there are too few numbers.
template <class ForEachKey>
__device__ inline bool count_round(const ForEachKey& for_each_key, int round, StreamShared& s, Selection& found) {
  const int next = max_of(0, found.bits - 11);
  const uint32_t low = found.low, span = found.bits == 32 ? ~0u : (1u << found.bits) - 1;
  const float least = number_of(low);
  uint32_t* const bins = s.shared.bins[round];
  for_each_key([&](float x) {
    const uint32_t distance = key_of(x) - low;
    if (x >= least && distance <= span) atomicAdd(&bins[distance >> next], 1u);
  });
  find_bin(s.shared, Cluster{0, 1}, round, found.rank);
  if (s.shared.found_bin == kNone) return false;
  found.narrow(s.shared, next);
  return true;
}

// Keys of which all that are selected are some.
struct Candidates {
  int listed;    // 0: there is no list
  int round;     // the next one
  bool counted;  // `found` is a bin that the k-th key is in, and no bound alone
};

template <typename T>
__device__ inline Candidates list_candidates(const StreamRow<T>& row, int count, StreamShared& s, Selection& found) {
  const uint32_t k = found.rank;
  int round = 0;
  if (count >= 5 * static_cast<int>(k)) {
    if (!bound_row(row, count, s, found)) return {};
    round = 1;
    if (list_row(row, number_of(found.low), s, s.num_listed[0])) return {static_cast<int>(s.num_listed[0]), 1, false};
  }
  const auto for_each_key = [&](const auto& run) {
    row.for_each([&](const float(&x)[kAtOnce][kVec]) {
#pragma unroll
      for (int i = 0; i < kAtOnce * kVec; ++i) run(x[i / kVec][i % kVec]);
    });
  };
  while (found.bits > 0) {
    if (!count_round(for_each_key, round++, s, found)) return {};
    if (k - found.rank + s.shared.found_count > kStreamListed) continue;
    if (!list_row(row, number_of(found.low), s, s.num_listed[1])) return {};
    return {static_cast<int>(s.num_listed[1]), round, true};
  }
  return {};  // too many are equal to the k-th
}

// False: nothing has been written.
template <typename T>
__device__ inline bool select_streaming(const SelectParams& p, int64_t row, const RowKeys& keys, const Share<T>& share,
                                        StreamShared& s) {
  const int thread = threadIdx.x, count = static_cast<int>(keys.count);
  Selection found{kLeastKey, 32, static_cast<uint32_t>(p.k), false, 0, 0};
  const Candidates candidates = list_candidates(StreamRow<T>(share), count, s, found);
  const int listed = candidates.listed;
  if (listed == 0) return false;
  const auto for_each_key = [&](const auto& run) {
    for (int i = thread; i < listed; i += kThreads) run(s.listed[i]);
  };
  bool counted = candidates.counted;
  for (int round = candidates.round; !counted || (found.bits > 0 && !found.whole); ++round) {
    if (!count_round(for_each_key, round, s, found)) return false;
    counted = true;
  }

  const int words = ceil_div(count, 32);
  for (int i = thread; i < words; i += kThreads) s.above()[i] = s.equal()[i] = 0;
  __syncthreads();
  const float least = number_of(found.low);
  const bool ties = !found.whole;  // of those equal to the k-th, not all are selected
  for (int i = thread; i < listed; i += kThreads) {
    const float x = s.listed[i];
    const int place = s.places[i];
    if (x >= least) atomicOr((ties && x == least ? s.equal() : s.above()) + place / 32, 1u << place % 32);
  }
  __syncthreads();

  const uint32_t wanted = ties ? found.rank : 0;  // of the equal ones
  const int each = ceil_div(words, kThreads), first = thread * each, last = min_of(first + each, words);
  uint2 mine{0, 0};
  for (int word = first; word < last; ++word) {
    mine = {mine.x + __popc(s.above()[word]), mine.y + __popc(s.equal()[word])};
  }
  uint2 place = sum_before(mine, s.shared.warp_sums);
  auto* const staged = reinterpret_cast<int32_t*>(s.listed);
  for (int word = first; word < last; ++word) {
    const uint32_t above = s.above()[word], equal = s.equal()[word];
    for (uint32_t both = above | equal; both != 0; both &= both - 1) {
      const int bit = __ffs(both) - 1;
      const bool is_equal = equal >> bit & 1;
      if (!is_equal || place.y < wanted) staged[place.x + min_of(place.y, wanted)] = word * 32 + bit;
      is_equal ? ++place.y : ++place.x;
    }
  }
  __syncthreads();
  write_positions(p, row, keys.request, staged, 0, static_cast<uint32_t>(p.k), kThreads);
  return true;
}

// Grid: a CTA per row.
template <typename T>
__global__ void __launch_bounds__(kThreads, kStreamCtas)
    topk_select_stream_kernel(const __grid_constant__ SelectParams p) {
  extern __shared__ __align__(16) uint8_t memory[];
  StreamShared& s = *reinterpret_cast<StreamShared*>(memory);
  const int64_t row = blockIdx.x;
  const Cluster alone{0, 1};
  clear_bins(s.shared);
  if (threadIdx.x == 0) s.num_listed[0] = s.num_listed[1] = 0;
  wait_for_earlier_kernels();
  let_next_kernel_start();
  if (p.report != nullptr && threadIdx.x == 0) report_row(p, row);
  const RowKeys keys = keys_of(p, row);
  if (keys.count <= p.k) return take_all(p, row, keys, threadIdx.x, kThreads);
  __syncthreads();  // the counts are zero
  if (select_streaming(p, row, keys, Share<T>(p, row, keys, alone), s)) return;
  __syncthreads();
  clear_bins(s.shared);
  __syncthreads();
  select_rereading<T>(p, row, alone, s.shared, reinterpret_cast<int32_t*>(s.listed));
}

}  // namespace attnops::sparse_indexer
