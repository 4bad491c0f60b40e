#pragma once
#include "device/common/pdl.cuh"
#include "sparse_indexer/cuda/reread.cuh"

// Selection of many long rows: a CTA a row, and three on a multiprocessor, so that some wait for memory while others
// count. Keys are read twice, the second time from L2: for a bound, which the k-th of the maxima of groups is, and for
// the keys from there on. The rest is done with a list of these.
namespace attnops::sparse_indexer {

inline constexpr int kStreamCtas = 3;
inline constexpr int kStreamListed = 4096;     // keys that a list has room for
inline constexpr int kMostStreamed = 1 << 17;  // columns: a bit of each
inline constexpr int kAtOnce = 4;              // accesses of a thread that are on their way

struct StreamShared {
  Shared shared;                  // in the end its bins are bits of keys
  float listed[kStreamListed];    // in any order; in the end positions
  int32_t places[kStreamListed];  // where they are in the row
  uint32_t num_listed;

  __device__ uint32_t* above() { return shared.bins[0]; }
  __device__ uint32_t* equal() { return shared.bins[2]; }
};
static_assert(2 * kBins * 32 == kMostStreamed && kStreamListed >= kMaxSelected);

// All keys of a row that has no more than k.
__device__ inline void take_all(const SelectParams& p, int64_t row, const RowKeys& keys, int first, int step) {
  int32_t* const indices = p.indices + row * p.stride_indices;
  int32_t* const positions = p.positions != nullptr ? p.positions + row * p.stride_positions : nullptr;
  for (int i = first; i < p.k; i += step) {
    const bool is_key = i < keys.count;
    indices[i] = is_key ? index_of(p, row, keys.request, i) : -1;
    if (positions != nullptr) positions[i] = is_key ? i : -1;
  }
}

// A row of fewer than 2^17 keys, by accesses that start at multiples of kVec elements of memory.
template <typename T>
struct StreamRow {
  const T* base;   // where access 0 lies, up to kVec - 1 elements before the row
  int begin, end;  // elements from base on that are the row's
  int steps;       // accesses of a thread, the same in all

  __device__ explicit StreamRow(const Share<T>& share)
      : base(share.base), begin(static_cast<int>(share.begin)), end(static_cast<int>(share.end)) {
    steps = ceil_div(end, kThreads * kVec);
  }

  // NaN where the row has no key.
  __device__ void load(int step, float (&x)[kVec]) const {
    const int at = (step * kThreads + static_cast<int>(threadIdx.x)) * kVec;
    if (at >= begin && at + kVec <= end) {
      const auto v = *reinterpret_cast<const RowVec<T, kVec>*>(base + at);
#pragma unroll
      for (int i = 0; i < kVec; ++i) x[i] = v.at(i);
    } else {
#pragma unroll
      for (int i = 0; i < kVec; ++i) {
        const bool has = at + i >= begin && at + i < end;
        x[i] = has ? static_cast<float>(base[at + i]) : __int_as_float(0x7FFFFFFF);
      }
    }
  }

  // Calls run(x, position of x[0]) for every access of this thread, all threads the same number of times.
  template <class Run>
  __device__ void for_each(const Run& run) const {
#pragma unroll 1
    for (int first = 0; first < steps; first += kAtOnce) {
      float x[kAtOnce][kVec];
#pragma unroll
      for (int s = 0; s < kAtOnce; ++s) load(first + s, x[s]);  // beyond the end: NaN
#pragma unroll
      for (int s = 0; s < kAtOnce; ++s) {
        run(x[s], ((first + s) * kThreads + static_cast<int>(threadIdx.x)) * kVec - begin);
      }
    }
  }
};

// A lower bound of the k-th key, and the bits of the keys' span from there on. False: there are too few numbers.
template <typename T>
__device__ inline bool bound_row(const StreamRow<T>& row, int count, StreamShared& s, Selection& found) {
  const int k = static_cast<int>(found.rank), groups = count / kVec;
  int of_group = 1;  // accesses; at least 2 k groups remain
  while (groups / of_group >= 4 * k) of_group *= 2;
  float most = __int_as_float(0x7FFFFFFF), highest = most;
  int seen = 0;
  const auto end_group = [&] {
    if (most == most) atomicAdd(&s.shared.bins[0][ordered(most) >> 21], 1u);
    highest = fmaxf(highest, most);
    most = __int_as_float(0x7FFFFFFF), seen = 0;
  };
  row.for_each([&](const float(&x)[kVec], int) {
    most = fmaxf(most, fmaxf(fmaxf(x[0], x[1]), fmaxf(x[2], x[3])));
    if (++seen == of_group) end_group();
  });
  if (seen > 0) end_group();
  const uint32_t max_key = __reduce_max_sync(~0u, highest == highest ? ordered(highest) : 0u);
  if (threadIdx.x % 32 == 0) atomicMax(&s.shared.max_key, max_key);
  find_bin(s.shared, Cluster{0, 1}, 0, found.rank);
  if (s.shared.found_bin == kNone) return false;
  found.low = max_of(s.shared.found_bin << 21, kLeastKey);
  found.bits = 32 - __clz(s.shared.row_max - found.low);
  return true;
}

// Lists the keys from `least` on. False: there are too many.
template <typename T>
__device__ inline bool list_row(const StreamRow<T>& row, float least, StreamShared& s) {
  const int lane = threadIdx.x % 32;
  row.for_each([&](const float(&x)[kVec], int position) {
    uint32_t masks[kVec], all = 0;
#pragma unroll
    for (int i = 0; i < kVec; ++i) {
      masks[i] = __ballot_sync(~0u, x[i] >= least);
      all |= masks[i];
    }
    if (all == 0) return;
    uint32_t total = 0;
#pragma unroll
    for (int i = 0; i < kVec; ++i) total += __popc(masks[i]);
    uint32_t slot = lane == 0 ? atomicAdd(&s.num_listed, total) : 0;
    slot = __shfl_sync(~0u, slot, 0);
#pragma unroll
    for (int i = 0; i < kVec; ++i) {
      const uint32_t at = slot + __popc(masks[i] & ((1u << lane) - 1));
      if (x[i] >= least && at < kStreamListed) {
        s.listed[at] = x[i];
        s.places[at] = position + i;
      }
      slot += __popc(masks[i]);
    }
  });
  __syncthreads();
  return s.num_listed <= kStreamListed;
}

// False: nothing has been written.
template <typename T>
__device__ inline bool select_streaming(const SelectParams& p, int64_t row, const RowKeys& keys, const Share<T>& share,
                                        StreamShared& s) {
  const int thread = threadIdx.x, count = static_cast<int>(keys.count);
  if (count < 5 * p.k) return false;
  const StreamRow<T> stream(share);
  Selection found{kLeastKey, 32, static_cast<uint32_t>(p.k), false, 0, 0};
  if (!bound_row(stream, count, s, found) || !list_row(stream, number_of(found.low), s)) return false;
  const int listed = static_cast<int>(s.num_listed);
  int round = 1;
  do {
    const int next = max_of(0, found.bits - 11);
    const uint32_t low = found.low, span = found.bits == 32 ? ~0u : (1u << found.bits) - 1;
    for (int i = thread; i < listed; i += kThreads) {
      const uint32_t distance = ordered(s.listed[i]) - low;
      if (distance <= span) atomicAdd(&s.shared.bins[round][distance >> next], 1u);
    }
    find_bin(s.shared, Cluster{0, 1}, round, found.rank);
    if (s.shared.found_bin == kNone) return false;
    found.narrow(s.shared, next);
    ++round;
  } while (found.bits > 0 && !found.whole);

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
  write_positions(p, row, keys.request, staged, 0, static_cast<uint32_t>(p.k));
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
  if (threadIdx.x == 0) s.num_listed = 0;
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
