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

  __device__ uint32_t first_place(int32_t row) const {
    return __umulhi(static_cast<uint32_t>(row) * 2654435761u, places);
  }
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

// A thread's places of a list, neighbours: rows, or no row.
template <int kEach>
struct OwnRows {
  int32_t row[kEach];

  __device__ void load(const ShareParams& p, int64_t token, bool is_there) {
    const int begin = static_cast<int>(threadIdx.x) * kEach, end = is_there ? p.length(token) : 0;
    const int32_t* list = p.indices + token * p.stride_list + begin;
#pragma unroll
    for (int i = 0; i < kEach; ++i) row[i] = begin + i < end ? list[i] : kEmpty;
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

// Lists of up to kThreads * kEach places.
template <int kEach>
__global__ void __launch_bounds__(kThreads)
    share_lists_kernel(const __grid_constant__ ShareParams p, const __grid_constant__ int places) {
  static_assert(kEach <= 32);
  extern __shared__ __align__(16) int32_t memory[];
  __shared__ int sums[kWarps];
  const int thread = threadIdx.x;
  const Table table{memory, reinterpret_cast<uint32_t*>(memory + places), static_cast<uint32_t>(places)};
  for (int i = thread; i < places / 4; i += kThreads) {
    reinterpret_cast<int4*>(table.rows)[i] = make_int4(kEmpty, kEmpty, kEmpty, kEmpty);
    table.masks[i] = 0;
  }
  wait_for_earlier_kernels();
  let_next_kernel_start();
  const int64_t group = blockIdx.x, first = group * p.together;
  int32_t* const shared = p.shared + group * p.stride_shared;
  uint8_t* const masks = p.masks + group * p.stride_masks;
  OwnRows<kEach> next;
  next.load(p, first, true);
  __syncthreads();
  int count = 0;
  bool twice = false;
#pragma unroll 1
  for (int token = 0; token < p.together; ++token) {
    const OwnRows<kEach> own = next;
    next.load(p, first + token + 1, token + 1 < p.together);
    uint32_t is_new = 0;  // a bit of each place
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
      bool owns = false;
      if (own.row[i] >= 0 && !table.add(own.row[i], token, owns)) twice = true;
      if (owns) is_new |= 1u << i;
    }
    int total = 0, place = count + sum_before(__popc(is_new), sums, total);
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
      if (is_new >> i & 1) shared[place++] = own.row[i];
    }
    count += total;
  }
  if (__syncthreads_or(twice)) {  // a row counts as often as a token names it: lists one behind the other
    count = 0;
#pragma unroll 1
    for (int token = 0; token < p.together; ++token) {
      next.load(p, first + token, true);
      int mine = 0, total = 0;
#pragma unroll
      for (int i = 0; i < kEach; ++i) mine += next.row[i] >= 0;
      int place = count + sum_before(mine, sums, total);
#pragma unroll
      for (int i = 0; i < kEach; ++i) {
        if (next.row[i] < 0) continue;
        shared[place] = next.row[i];
        masks[place++] = static_cast<uint8_t>(1u << token);
      }
      count += total;
    }
  } else {
#pragma unroll 4
    for (int i = thread; i < count; i += kThreads) masks[i] = table.mask_of(shared[i]);
  }
  if (thread == 0) p.shared_lengths[group] = count;
}

template <int kEach>
void launch_lists(const ShareParams& p, cudaStream_t stream) {
  // A quarter more than there may be rows.
  const auto places_of = [](int keys) { return round_up(keys + keys / 4 + 4, 4); };
  const auto bytes_of = [](int places) { return places * 5; };
  const int places = places_of(p.together * p.topk);
  launch_dependent<&share_lists_kernel<kEach>>(
      "share_lists", {p.groups, kThreads, bytes_of(places), bytes_of(places_of(kMostSharedKeys))}, stream, p, places);
}

}  // namespace

void launch_share_lists(const ShareParams& p, CUstream_st* stream) {
  if (p.groups == 0) return;
  if (p.topk <= 2 * kThreads) return launch_lists<2>(p, stream);
  if (p.topk <= 4 * kThreads) return launch_lists<4>(p, stream);
  launch_lists<kMostSharedKeys / kThreads>(p, stream);
}

}  // namespace attnops::sparse_mla
