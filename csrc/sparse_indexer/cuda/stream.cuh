#pragma once
#include "sparse_indexer/cuda/reread.cuh"

// Selection of many long rows: a CTA a row, and three on a multiprocessor, so that some wait for memory while others
// count. Keys are read twice, the second time from L2: for a bound, which the k-th of the maxima of groups is, and for
// the keys from there on. The rest is done with a list of these. Long rows guess a bound from a sample first, and read
// all keys once where the list proves it right. Rows of few more than k keys have no bound, and of some the list has no
// room: all their keys from the bound on are counted, which gives a better one.
namespace attnops::sparse_indexer {

inline constexpr int kStreamCtas = 3;
inline constexpr int kStreamListed = 4096;       // keys that a list has room for
inline constexpr float kStreamExpected = 3500;   // so many are expected to fit
inline constexpr int kLeastGuessed = 1 << 15;    // keys of a row whose bound is guessed first
inline constexpr uint32_t kMoreGuessed = 450;    // keys that a guess has more than 5 / 4 k
inline constexpr int kLeastBound = 6;            // keys of a row for each of k: a list of fewer would have no room
inline constexpr int kLeastStreamed = 2048 + 1;  // columns
inline constexpr int kMostStreamed = 1 << 17;    // columns: a bit of each
inline constexpr int kAtOnce = 4;                // accesses of a thread that are on their way
inline constexpr int kMostKept = 2 * kStreamListed / kThreads;  // keys of a thread, for a finer bound

struct StreamShared {
  Shared shared;                                  // in the end its bins are bits of keys
  alignas(16) uint32_t words[2 * kStreamListed];  // keys that are kept, then the list
  uint32_t num_listed[3];                         // of a bound's list, of a counted one, of a guess's

  __device__ uint32_t* above() { return shared.bins[0]; }
  __device__ uint32_t* equal() { return shared.bins[2]; }
  __device__ float* kept() { return reinterpret_cast<float*>(words); }
  __device__ float* listed() { return reinterpret_cast<float*>(words); }                      // in any order
  __device__ int32_t* places() { return reinterpret_cast<int32_t*>(words) + kStreamListed; }  // of them in the row
  __device__ int32_t* staged() { return reinterpret_cast<int32_t*>(words); }                  // in the end: positions
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

  // Calls run(x, first) for batches of keys: a warp has kBatch that lie side by side, of which x[s][i] of lane l is the
  // one at first / kBatch * kBatch + s * kStride + l * kVec + i. Warps without keys of a batch do not call it.
  static constexpr int kStride = 32 * kVec, kBatch = kAtOnce * kStride;
  template <class Run>
  __device__ void for_each(const Run& run) const {
    const int thread = threadIdx.x, lane = thread % 32;
#pragma unroll 1
    for (int first = thread / 32 * kBatch; first < end; first += kWarps * kBatch) {
      float x[kAtOnce][kVec];
      const int at = first + lane * kVec;
      if (first >= begin && first + kBatch <= end) {
#pragma unroll
        for (int s = 0; s < kAtOnce; ++s) load_whole(at + s * kStride, x[s]);
      } else {
#pragma unroll
        for (int s = 0; s < kAtOnce; ++s) load(at + s * kStride, x[s]);
      }
      run(x, first);
    }
  }
};

// A finer bound than the bin that has been found: the key of that rank among those kept of this thread and the others.
__device__ inline uint32_t refined(StreamShared& s, int num_kept, uint32_t rank) {
  const uint32_t low = s.shared.found_bin << 21, left = rank - s.shared.found_above;
  for (int i = 0; i < num_kept; ++i) {
    const uint32_t distance = key_of(s.kept()[i * kThreads + threadIdx.x]) - low;
    count_in(s.shared.bins[1], distance >> 10, distance < 1u << 21);
  }
  reinterpret_cast<uint4*>(s.shared.bins[0])[threadIdx.x] = make_uint4(0, 0, 0, 0);  // for a later round
  find_bin(s.shared, Cluster{0, 1}, 1, left);
  return max_of(s.shared.found_bin == kNone ? low : low + (s.shared.found_bin << 10), kLeastKey);
}

// What is no bound, but a key that some more than k are likely to reach: one of a sample of small pieces all over the
// row. False: there are too few numbers.
template <typename T>
__device__ inline bool guess_bound(const StreamRow<T>& row, int count, StreamShared& s, Selection& found) {
  constexpr int kSampled = kAtOnce * kVec;  // keys of a thread
  static_assert(kSampled <= kMostKept);
  const int thread = threadIdx.x;
  int apart = 1;  // pieces of 64 or 32 bytes, four lanes each, of which one is taken
  while (count > apart * kThreads * kSampled) apart *= 2;
  float x[kAtOnce][kVec];
#pragma unroll
  for (int i = 0; i < kAtOnce; ++i) {
    const int piece = (i * kThreads + thread) / 4;
    row.load(((piece * apart + (piece & (apart - 1))) * 4 + thread % 4) * kVec, x[i]);
  }
  int num_kept = 0;
#pragma unroll
  for (int i = 0; i < kSampled; ++i) {
    const float key = x[i / kVec][i % kVec];
    count_in(s.shared.bins[0], key_of(key) >> 21, key == key);
    if (key == key) s.kept()[num_kept++ * kThreads + thread] = key;
  }
  const uint32_t wanted = found.rank + found.rank / 4 + kMoreGuessed, rank = ceil_div<uint32_t>(wanted, apart);
  find_bin(s.shared, Cluster{0, 1}, 0, rank);
  if (s.shared.found_bin == kNone) return false;
  found.low = refined(s, num_kept, rank);
  found.bits = 32 - __clz(kGreatestKey - found.low);
  return true;
}

// A lower bound of the k-th key, and the bits of the keys' span from there on. Rounds that this took; 0: there are too
// few numbers.
template <typename T>
__device__ inline int bound_row(const StreamRow<T>& row, int count, StreamShared& s, Selection& found) {
  static_assert(kAtOnce == 4);
  const int k = static_cast<int>(found.rank), thread = threadIdx.x;
  int of_group = 1, groups = count / kVec;  // accesses of a group; at least 2 k groups remain, or all
  while (groups >= 4 * k) of_group *= 2, groups /= 2;
  float most = __int_as_float(0x7FFFFFFF), highest = most;
  int seen = 0, num_kept = 0;
  const auto count_group = [&](float group) {
    count_in(s.shared.bins[0], key_of(group) >> 21, group == group);
    if (group == group && num_kept < kMostKept) s.kept()[num_kept++ * kThreads + thread] = group;
  };
  row.for_each([&](const float(&x)[kAtOnce][kVec], int) {
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
  const uint32_t max_key = __reduce_max_sync(~0u, highest == highest ? key_of(highest) : 0u);
  if (thread % 32 == 0) atomicMax(&s.shared.max_key, max_key);
  find_bin(s.shared, Cluster{0, 1}, 0, found.rank);
  if (s.shared.found_bin == kNone) return 0;
  const uint32_t row_max = s.shared.row_max, reach = s.shared.found_above + s.shared.found_count;
  found.low = max_of(s.shared.found_bin << 21, kLeastKey);
  // Keys that reach a bound which `reach` of the maxima do, if keys stand in no order.
  const float expected = -groups * __logf(max_of(1.f - static_cast<float>(reach) / groups, 1e-6f));
  const bool refines = expected > kStreamExpected;
  if (refines) found.low = refined(s, num_kept, found.rank);
  found.bits = 32 - __clz(row_max - found.low);
  return refines ? 2 : 1;
}

// Lists the keys from `least` on: a set of bits for the keys that a thread has of a batch, and then, of those in the
// set, where they are; keys themselves are read again, for registers have no index. False: there are too many.
template <typename T>
__device__ inline bool list_row(const StreamRow<T>& row, float least, StreamShared& s, uint32_t& num_listed) {
  constexpr int kKeys = kAtOnce * kVec, kBatch = StreamRow<T>::kBatch, kRead = 4;
  const int thread = threadIdx.x, lane = thread % 32;
  row.for_each([&](const float(&x)[kAtOnce][kVec], int batch) {
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
      s.places()[slot++] = batch + lane * kKeys + i;
    }
  });
  __syncthreads();
  const auto listed = static_cast<int>(num_listed);
  if (listed > kStreamListed) return false;
  // Each key by the thread that asks for it later.
  for (int first = thread; first < listed; first += kRead * kThreads) {
    int at[kRead]{};
    float x[kRead]{};
#pragma unroll
    for (int i = 0; i < kRead; ++i) {
      if (first + i * kThreads >= listed) continue;
      const uint32_t place = s.places()[first + i * kThreads], key = place % kKeys;
      at[i] = static_cast<int>(place / kBatch * kBatch + key / kVec * StreamRow<T>::kStride +
                               place % kBatch / kKeys * kVec + key % kVec);
      x[i] = static_cast<float>(row.base[at[i]]);
    }
#pragma unroll
    for (int i = 0; i < kRead; ++i) {
      if (first + i * kThreads >= listed) continue;
      s.listed()[first + i * kThreads] = x[i];
      s.places()[first + i * kThreads] = at[i] - row.begin;
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
  uint32_t* const bins = s.shared.bins[round % kRounds];
  for_each_key([&](float x) {
    const uint32_t distance = key_of(x) - low;
    count_in(bins, distance >> next, x >= least && distance <= span);
  });
  find_bin(s.shared, Cluster{0, 1}, round % kRounds, found.rank);
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
  if (count >= kLeastGuessed) {
    Selection guess = found;
    if (guess_bound(row, count, s, guess) && list_row(row, number_of(guess.low), s, s.num_listed[2]) &&
        s.num_listed[2] >= k) {
      found = guess;
      return {static_cast<int>(s.num_listed[2]), 2, false};
    }
    __syncthreads();
    clear_bins(s.shared);
    __syncthreads();
  }
  int round = 0;
  if (count >= kLeastBound * static_cast<int>(k)) {
    round = bound_row(row, count, s, found);
    if (round == 0) return {};
    if (list_row(row, number_of(found.low), s, s.num_listed[0])) {
      return {static_cast<int>(s.num_listed[0]), round, false};
    }
  }
  const auto for_each_key = [&](const auto& run) {
    row.for_each([&](const float(&x)[kAtOnce][kVec], int) {
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
    for (int i = thread; i < listed; i += kThreads) run(s.listed()[i]);
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
    const float x = s.listed()[i];
    const int place = s.places()[i];
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
  int32_t* const staged = s.staged();
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
  wait_for_earlier_kernels();
  let_next_kernel_start();
  if (p.report != nullptr && threadIdx.x == 0) report_row(p, row);
  const RowKeys keys = keys_of(p, row);
  if (keys.count <= p.k) return take_all(p, row, keys, threadIdx.x, kThreads);
  clear_bins(s.shared);
  if (threadIdx.x == 0) s.num_listed[0] = s.num_listed[1] = s.num_listed[2] = 0;
  __syncthreads();  // the counts are zero
  if (select_streaming(p, row, keys, Share<T>(p, row, keys, alone), s)) return;
  __syncthreads();
  clear_bins(s.shared);
  __syncthreads();
  select_rereading<T>(p, row, alone, s.shared, s.staged());
}

}  // namespace attnops::sparse_indexer
