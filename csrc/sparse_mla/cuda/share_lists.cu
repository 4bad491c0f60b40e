#include "device/common/launch_dependent.cuh"
#include "device/common/pdl.cuh"
#include "sparse_mla/cuda/share_lists.h"

// A CTA a group. Tokens put their rows into a table in shared memory, one token after the other: who finds a row's
// place empty lists it, and so the order depends on nothing but the lists.
namespace attnops::sparse_mla {
namespace {

constexpr int kThreads = 512, kWarps = kThreads / 32;
constexpr int32_t kEmpty = -1;  // no row

struct Table {
  int32_t* rows;    // [places]
  uint32_t* masks;  // a byte of each place
  uint32_t places;

  __device__ uint32_t first_place(int32_t row) const { return static_cast<uint32_t>(row) * 2654435761u % places; }
  __device__ uint32_t next(uint32_t place) const { return place + 1 == places ? 0 : place + 1; }

  // Adds a row of token `token`. `is_new`: nobody had it. False: the token had it already.
  __device__ bool add(int32_t row, int token, bool& is_new) const {
    uint32_t place = first_place(row);
    int32_t there = atomicCAS(&rows[place], kEmpty, row);
    while (there != kEmpty && there != row) {
      place = next(place);
      there = atomicCAS(&rows[place], kEmpty, row);
    }
    is_new = there == kEmpty;
    const uint32_t bit = 1u << (place % 4 * 8 + token);
    return (atomicOr(&masks[place / 4], bit) & bit) == 0;
  }
  __device__ uint8_t mask_of(int32_t row) const {
    uint32_t place = first_place(row);
    while (rows[place] != row) place = next(place);
    return static_cast<uint8_t>(masks[place / 4] >> place % 4 * 8);
  }
};

// Threads have `each` neighbouring places of a list.
struct Places {
  int begin, end;
  __device__ explicit Places(int topk) {
    const int each = ceil_div(topk, kThreads);
    begin = min_of(static_cast<int>(threadIdx.x) * each, topk);
    end = min_of(begin + each, topk);
  }
};

// The sum of `count` over the threads before this one, and of all. All threads have left an earlier call's barriers.
__device__ int sum_before(int count, int (&sums)[kWarps], int& total) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  int inclusive = count;
#pragma unroll
  for (int step = 1; step < 32; step *= 2) {
    const int other = __shfl_up_sync(~0u, inclusive, step);
    if (lane >= step) inclusive += other;
  }
  __syncthreads();
  if (lane == 31) sums[warp] = inclusive;
  __syncthreads();
  int before = 0;
  total = 0;
#pragma unroll
  for (int w = 0; w < kWarps; ++w) {
    if (w < warp) before += sums[w];
    total += sums[w];
  }
  return before + inclusive - count;
}

constexpr int kMostEach = kMostSharedKeys / kThreads;  // of a thread, of one list

__global__ void __launch_bounds__(kThreads)
    share_lists_kernel(const __grid_constant__ ShareParams p, const __grid_constant__ int places) {
  extern __shared__ __align__(16) int32_t memory[];
  __shared__ int sums[kWarps];
  const Table table{memory, reinterpret_cast<uint32_t*>(memory + places), static_cast<uint32_t>(places)};
  for (int i = threadIdx.x; i < places; i += kThreads) table.rows[i] = kEmpty;
  for (int i = threadIdx.x; i < places / 4; i += kThreads) table.masks[i] = 0;
  wait_for_earlier_kernels();
  let_next_kernel_start();
  const int64_t group = blockIdx.x;
  int32_t* const shared = p.shared + group * p.stride_shared;
  uint8_t* const masks = p.masks + group * p.stride_masks;
  const Places own(p.topk);
  __syncthreads();
  int count = 0;
  bool twice = false;
#pragma unroll 1
  for (int token = 0; token < p.together; ++token) {
    const int64_t at = group * p.together + token;
    const int32_t* list = p.indices + at * p.stride_list;
    const int end = min_of(own.end, p.length(at));
    uint32_t is_new = 0;  // a bit of each place
    for (int i = own.begin; i < end; ++i) {
      const int32_t row = list[i];
      bool owns = false;
      if (row >= 0 && !table.add(row, token, owns)) twice = true;
      if (owns) is_new |= 1u << (i - own.begin);
    }
    int total = 0, place = count + sum_before(__popc(is_new), sums, total);
    for (; is_new != 0; is_new &= is_new - 1) shared[place++] = list[own.begin + __ffs(is_new) - 1];
    count += total;
  }
  if (__syncthreads_or(twice)) {  // a row counts as often as a token names it: lists one behind the other
    count = 0;
#pragma unroll 1
    for (int token = 0; token < p.together; ++token) {
      const int64_t at = group * p.together + token;
      const int32_t* list = p.indices + at * p.stride_list;
      const int end = min_of(own.end, p.length(at));
      int mine = 0, total = 0;
      for (int i = own.begin; i < end; ++i) mine += list[i] >= 0;
      int place = count + sum_before(mine, sums, total);
      for (int i = own.begin; i < end; ++i) {
        if (list[i] < 0) continue;
        shared[place] = list[i];
        masks[place++] = static_cast<uint8_t>(1u << token);
      }
      count += total;
    }
  } else {
    for (int i = threadIdx.x; i < count; i += kThreads) masks[i] = table.mask_of(shared[i]);
  }
  if (threadIdx.x == 0) p.shared_lengths[group] = count;
}

}  // namespace

void launch_share_lists(const ShareParams& p, CUstream_st* stream) {
  if (p.groups == 0) return;
  static_assert(kMostEach <= 32);
  // A quarter more than there may be rows.
  const auto places_of = [](int keys) { return round_up(keys + keys / 4 + 4, 4); };
  const auto bytes_of = [](int places) { return places * 5; };
  const int places = places_of(p.together * p.topk);
  launch_dependent<&share_lists_kernel>(
      "share_lists", {p.groups, kThreads, bytes_of(places), bytes_of(places_of(kMostSharedKeys))}, stream, p, places);
}

}  // namespace attnops::sparse_mla
