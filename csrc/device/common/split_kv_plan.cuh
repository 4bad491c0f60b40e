#pragma once
#include <cuda_runtime_api.h>

#include <cstdint>
#include <stdexcept>
#include <string>

#include "core/math.h"
#include "device/common/launch_dependent.cuh"
#include "device/common/pdl.cuh"
#include "device/common/split_kv_plan_few.cuh"
#include "scheduler/split_kv.h"
#include "scheduler/split_kv_fill.h"

namespace attnops {

// What a run of requests adds up to: their tiles, their cuts in batch-invariant mode, the longest and the shortest.
// Where shares may be filled, `cuts` counts requests without keys.
struct PlanSums {
  int64_t tiles = 0, cuts = 0;
  int longest = 0, shortest = INT32_MAX;
};

// The sums of all threads, in one scan; `before` gets tiles and cuts of the threads before this one.
template <int kThreads, bool kFixed>
__device__ PlanSums scan_sums(const PlanSums& own, PlanSums& before) {
  constexpr int kWarps = kThreads / 32;
  __shared__ int64_t warp_tiles[kWarps], warp_cuts[kFixed ? kWarps : 1];
  __shared__ int warp_longest[kWarps], warp_shortest[kWarps];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const auto add_earlier = [lane](int64_t& sum, int step) {
    const int64_t other = __shfl_up_sync(~0u, sum, step);
    if (lane >= step) sum += other;
  };
  int64_t tiles = own.tiles, cuts = own.cuts;
#pragma unroll
  for (int step = 1; step < 32; step *= 2) {
    add_earlier(tiles, step);
    if constexpr (kFixed) add_earlier(cuts, step);
  }
  const int longest = __reduce_max_sync(~0u, own.longest), shortest = __reduce_min_sync(~0u, own.shortest);
  if (lane == 31) {
    warp_tiles[warp] = tiles;
    if constexpr (kFixed) warp_cuts[warp] = cuts;
    warp_longest[warp] = longest;
    warp_shortest[warp] = shortest;
  }
  __syncthreads();
  // Every warp adds up the totals for itself: one barrier less than electing a warp to do it.
  const bool has_warp = lane < kWarps;
  int64_t all_tiles = has_warp ? warp_tiles[lane] : 0, all_cuts = kFixed && has_warp ? warp_cuts[lane] : 0;
  PlanSums all;
  all.longest = __reduce_max_sync(~0u, has_warp ? warp_longest[lane] : 0);
  all.shortest = __reduce_min_sync(~0u, has_warp ? warp_shortest[lane] : INT32_MAX);
#pragma unroll
  for (int step = 1; step < kWarps; step *= 2) {
    add_earlier(all_tiles, step);
    if constexpr (kFixed) add_earlier(all_cuts, step);
  }
  all.tiles = __shfl_sync(~0u, all_tiles, kWarps - 1);
  before.tiles = tiles - own.tiles + (warp == 0 ? 0 : __shfl_sync(~0u, all_tiles, warp - 1));
  if constexpr (kFixed) {
    all.cuts = __shfl_sync(~0u, all_cuts, kWarps - 1);
    before.cuts = cuts - own.cuts + (warp == 0 ? 0 : __shfl_sync(~0u, all_cuts, warp - 1));
  }
  return all;
}

// The order in which works are dealt out (scheduler/split_kv.h), where a block holds the tiles of all requests. A warp
// has 32 neighbouring requests at a time.
template <int kThreads>
__device__ void put_in_order(const int32_t* tiles, int num_requests, bool even, int32_t* num_splits) {
  constexpr int kWarps = kThreads / 32, kMostChunks = kMostDealtRequests / 32;
  __shared__ uint8_t counts[kMostChunks][kDealtClasses];
  const int lane = threadIdx.x % 32, chunks = ceil_div(num_requests, 32);
  __syncthreads();  // the tiles of all are there, and zeros are written
  for (int chunk = threadIdx.x / 32; chunk < chunks; chunk += kWarps) {
    const int request = chunk * 32 + lane;
    const int own = request < num_requests ? dealt_class(tiles[request]) : -1;
    int count = 0;
#pragma unroll 4
    for (int i = 0; i < 32; ++i) count += __shfl_sync(~0u, own, i) == lane;
    counts[chunk][lane] = static_cast<uint8_t>(count);
  }
  __syncthreads();
  for (int chunk = threadIdx.x / 32; chunk < chunks; chunk += kWarps) {
    int earlier = 0, all = 0;  // of the class number `lane`
    for (int c = 0; c < chunks; ++c) {
      if (c == chunk) earlier = all;
      all += counts[c][lane];
    }
    int from_here_on = all;  // of this class and longer ones
#pragma unroll
    for (int step = 1; step < 32; step *= 2) {
      const int other = __shfl_down_sync(~0u, from_here_on, step);
      if (lane + step < 32) from_here_on += other;
    }
    const int longer = __shfl_sync(~0u, from_here_on, kShortWorkTiles + 1);
    const int request = chunk * 32 + lane;
    const int own = request < num_requests ? dealt_class(tiles[request]) : 0;
    const int first = __shfl_sync(~0u, from_here_on - all + earlier, own);
    const unsigned same = __match_any_sync(~0u, own);
    if (request < num_requests) num_splits[first + __popc(same & ((1u << lane) - 1))] = request;
    if (request == 0) num_splits[num_requests] = dealt_word(longer, even);
  }
}

// Where shares begin that are filled, and where the last ends, into `points`; false: no budget is enough. By all
// threads of a block, where prefix and tiles are whole. A lane of two warps tries a budget on a half of the works.
template <int kThreads>
__device__ bool find_filled(const SplitKvGeometry& g, const SplitKvBatch& batch, int total, SplitKvPoint* points) {
  constexpr int kLanes = 2 * kFilledBudgets;
  static_assert(kLanes == 32 && kThreads > kMostFilledShares);
  __shared__ uint16_t places[kMostFilledShares][2][kLanes];
  __shared__ int counts[2][kLanes];
  const int thread = static_cast<int>(threadIdx.x), shares = num_groups(g), lane = thread % kLanes;
  if (thread < 2 * kLanes) {
    const int half = thread / kLanes;
    const bool cuts = lane >= kFilledBudgets;
    const SplitKvFilling filling{filled_budget(g, total, lane % kFilledBudgets), cuts};
    counts[half][lane] =
        fill_shares(g, batch, filling, filled_half(g, batch, total, cuts, half), shares,
                    [&](int share, int place) { places[share][half][lane] = static_cast<uint16_t>(place); });
  }
  __syncthreads();
  const unsigned enough = __ballot_sync(~0u, counts[0][lane] + counts[1][lane] <= shares);
  const auto first_of = [&](unsigned lanes) { return lanes == 0 ? kFilledBudgets : __ffs(lanes) - 1; };
  const int whole = first_of(enough & ((1u << kFilledBudgets) - 1)), with_cuts = first_of(enough >> kFilledBudgets);
  const bool cuts = filled_with_cuts(with_cuts, whole);
  const int number = cuts ? with_cuts : whole;
  if (number == kFilledBudgets) return false;
  const int taken = number + (cuts ? kFilledBudgets : 0), of_first = counts[0][taken];
  if (thread <= shares) {
    const int half = thread >= of_first;
    points[thread] = thread < of_first + counts[1][taken]
                         ? filled_point(g, batch, places[thread - half * of_first][half][taken])
                         : SplitKvPoint{num_works(g), 0};
  }
  __syncthreads();
  return true;
}

// The split-KV plan in one small launch: the rows and num_splits of scheduler/split_kv.h, bit for bit.
//
// One CTA. Every thread adds up the tiles of a run of neighbouring requests, a block scan turns the sums into the cost
// prefix in shared memory, every thread finds where one group of parts begins, and every thread makes one part's row.
//
// What takes time in so small a kernel is its instructions: each is fetched and executed once. So the tile size and
// "balanced" are compile-time constants (divisions become shifts), neighbours share the points between them, and one
// scan tells all that the planner wants to know of the batch.
template <int kThreads, int kTileTokens, bool kFixed, bool kFills, class Lengths>
__global__ void __launch_bounds__(kThreads)
    split_kv_plan_kernel(const __grid_constant__ SplitKvGeometry shape, const Lengths cache_seqlens,
                         SplitKvEntry* __restrict__ entries, int32_t* __restrict__ num_splits) {
  extern __shared__ int64_t shared[];
  __shared__ SplitKvPoint points[kThreads];
  SplitKvGeometry g = shape;
  g.tile_tokens = kTileTokens;
  if constexpr (!kFixed) g.fixed_split_tiles = 0;
  int64_t* const prefix = shared;                                                  // [B + 1]
  int32_t* const tiles = reinterpret_cast<int32_t*>(prefix + g.num_requests + 1);  // [B]
  const int thread = static_cast<int>(threadIdx.x);
  let_next_kernel_start();  // it waits for this one in any case, and this one for those ahead
  wait_for_earlier_kernels();

  const int each = (g.num_requests + kThreads - 1) / kThreads;
  const int begin = min_of(thread * each, g.num_requests);
  const int end = min_of(begin + each, g.num_requests);
  PlanSums own, before;
  for (int b = begin; b < end; ++b) {
    const int length = cache_seqlens[b], count = num_tiles(g, length);
    const int keyless = kFills ? count - filled_tiles(g, length) : 0;
    tiles[b] = count - keyless;
    own.tiles += count;
    if constexpr (kFixed) own.cuts += num_fixed_splits(g, count);
    if constexpr (kFills) own.cuts += keyless;
    own.longest = max_of(own.longest, count);
    own.shortest = min_of(own.shortest, count);
  }
  const PlanSums all = scan_sums < kThreads, kFixed || kFills > (own, before);
  if (g.even_shares > 0) g.uneven = all.longest != all.shortest;
  // Of the requests before one, which have so many tiles.
  const auto cost_before = [&](int request, int64_t count) {
    return g.works_per_request * (overhead_cost(g) * request + kTileCost * count);
  };
  const SplitKvBatch batch{prefix, tiles};
  if constexpr (kFills) {  // requests without keys have no tile here, and one below
    const bool uneven = all.longest != all.shortest || (all.cuts > 0 && all.cuts < g.num_requests);
    const int64_t total = cost_before(g.num_requests, all.tiles - all.cuts);
    if (fills_shares(g, uneven, total)) {
      int64_t earlier = before.tiles - before.cuts;
      for (int b = begin; b < end; ++b) {
        prefix[b] = cost_before(b, earlier);
        earlier += tiles[b];
        num_splits[b] = 0;
      }
      if (thread == 0) {
        prefix[g.num_requests] = total;
        num_splits[g.num_requests] = 0;
      }
      __syncthreads();
      if (find_filled<kThreads>(g, batch, static_cast<int>(total), points)) {
        for (int row = thread; row < g.num_sm_parts; row += kThreads) {
          entries[row] = filled_entry(points, num_groups(g), row / g.parts_per_group);
        }
        return;
      }
      __syncthreads();
    }
    for (int b = begin; b < end; ++b) tiles[b] = max_of(tiles[b], 1);
    before.cuts = 0;
  }
  for (int b = begin; b < end; ++b) {
    prefix[b] = cost_before(b, before.tiles);
    num_splits[b] = splits_before(before.cuts);
    if (b + 1 == end) break;
    before.tiles += tiles[b];
    if constexpr (kFixed) before.cuts += num_fixed_splits(g, tiles[b]);
  }
  const int64_t total = cost_before(g.num_requests, all.tiles);
  if (thread == 0) {
    prefix[g.num_requests] = total;
    num_splits[g.num_requests] = splits_before(kFixed ? all.cuts : 0);
  }
  const int64_t budget = part_budget(g, total);
  if (!kFixed && (g.short_tiles > 0 || g.more_of_lone > 0)) {
    g.whole = all.longest <= most_whole_tiles(g, budget);
    g.cuts = cuts_of_works(g, budget, tiles[0]);  // there is one: batches of few go elsewhere
    // Every warp counts for itself.
    g.piece = longest_piece(g, all.tiles * g.works_per_request, [&](int most) {
      int count = 0;
      for (int b = thread % 32; b < g.num_requests; b += 32) count += ceil_div(tiles[b], most);
      return __reduce_add_sync(~0u, count) * g.works_per_request;
    });
    if (g.piece > 0) {
      PlanSums pieces, pieces_before;
      for (int b = begin; b < end; ++b) pieces.tiles += g.works_per_request * ceil_div(tiles[b], g.piece);
      __syncthreads();  // the sums before are read
      const PlanSums all_pieces = scan_sums<kThreads, kFixed>(pieces, pieces_before);
      for (int b = begin; b < end; ++b) {
        prefix[b] = pieces_before.tiles;
        pieces_before.tiles += g.works_per_request * ceil_div(tiles[b], g.piece);
      }
      if (thread == 0) prefix[g.num_requests] = all_pieces.tiles;
    }
  }
  if constexpr (!kFixed) {
    if (deals_works(g, budget, all.longest)) {
      put_in_order<kThreads>(tiles, g.num_requests, all.longest == all.shortest, num_splits);
    }
  }
  // A round serves one group less than it finds points: a row needs the next group's beginning, too.
  const int groups = num_groups(g);
  for (int first = 0; first < groups; first += kThreads - 1) {
    __syncthreads();  // the prefix is whole; the last round's points are read
    points[thread] = share_begin(g, batch, budget, min_of(first + thread, groups));
    __syncthreads();
    const int rows = min_of(kThreads - 1, groups - first) * g.parts_per_group;
    for (int row = thread; row < rows; row += kThreads) {
      const int i = row / g.parts_per_group;
      entries[first * g.parts_per_group + row] = split_kv_entry(g, batch, budget, first + i, points[i], points[i + 1]);
    }
  }
}

inline constexpr int kPlanOwnBytes = 10 * 1024;  // of shared memory, at most: the points and the scan

constexpr size_t plan_bytes(int64_t requests) { return (requests + 1) * sizeof(int64_t) + requests * sizeof(int32_t); }

// The planner holds a batch in shared memory.
inline void check_batch_fits(const char* op, int num_requests) {
  constexpr int kAlwaysFits = 3000;
  if (num_requests <= kAlwaysFits) return;  // and nobody has to ask the device
  int device = 0, most_bytes = 0;
  check_cuda(cudaGetDevice(&device), op);
  check_cuda(cudaDeviceGetAttribute(&most_bytes, cudaDevAttrMaxSharedMemoryPerBlockOptin, device), op);
  most_bytes -= kPlanOwnBytes;
  if (plan_bytes(num_requests) <= static_cast<size_t>(most_bytes)) return;
  const int most = (most_bytes - static_cast<int>(plan_bytes(0))) / static_cast<int>(plan_bytes(1) - plan_bytes(0));
  throw std::runtime_error(std::string("attnops::") + op + ": cache_seqlens.shape[0] (batch_size) must be at most " +
                           std::to_string(most) + ", which fills this GPU's shared memory, got " +
                           std::to_string(num_requests) + ". Plan and decode the batch in parts");
}

template <int kThreads, int kTileTokens, bool kFixed, bool kFills = false, class Lengths>
void launch_split_kv_plan_as(const SplitKvGeometry& g, const Lengths& cache_seqlens, SplitKvEntry* entries,
                             int32_t* num_splits, cudaStream_t stream) {
  auto* const kernel = &split_kv_plan_kernel<kThreads, kTileTokens, kFixed, kFills, Lengths>;
  const size_t bytes = plan_bytes(g.num_requests);
  constexpr size_t kAlwaysThere = kFills ? plan_bytes(kMostFilledRequests) : 48 * 1024 - kPlanOwnBytes;
  if (bytes > kAlwaysThere) {
    launch_dependent_prepare<&split_kv_plan_kernel<kThreads, kTileTokens, kFixed, kFills, Lengths>>(
        "split_kv_plan_kernel", static_cast<int>(kAlwaysThere));
    check_cuda(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(bytes)),
               "shared memory for the plan of so large a batch");
  }
  launch_dependent<&split_kv_plan_kernel<kThreads, kTileTokens, kFixed, kFills, Lengths>>(
      "split_kv_plan_kernel", {1, kThreads, static_cast<int>(bytes), static_cast<int>(kAlwaysThere)}, stream, g,
      cache_seqlens, entries, num_splits);
}

template <int kThreads, int kTileTokens, bool kFixed, class Lengths>
void launch_split_kv_plan_few_as(const SplitKvGeometry& g, const Lengths& cache_seqlens, SplitKvEntry* entries,
                                 int32_t* num_splits, cudaStream_t stream) {
  launch_dependent<&split_kv_plan_few_kernel<kThreads, kTileTokens, kFixed, Lengths>>(
      "split_kv_plan_few_kernel", {1, kThreads, 0, 0}, stream, g, cache_seqlens, entries, num_splits);
}

template <int kTileTokens, bool kFixed, bool kFills, class Lengths>
void launch_split_kv_plan_by_size(const SplitKvGeometry& g, const Lengths& cache_seqlens, SplitKvEntry* entries,
                                  int32_t* num_splits, cudaStream_t stream) {
  if constexpr (kFills) {
    if (may_fill_shares(g)) {
      if (g.num_requests <= 192)
        return launch_split_kv_plan_as<192, kTileTokens, kFixed, true>(g, cache_seqlens, entries, num_splits, stream);
      return launch_split_kv_plan_as<512, kTileTokens, kFixed, true>(g, cache_seqlens, entries, num_splits, stream);
    }
  }
  if (g.num_requests <= kFewRequests) {
    if (g.num_sm_parts <= 5 * 31)
      return launch_split_kv_plan_few_as<160, kTileTokens, kFixed>(g, cache_seqlens, entries, num_splits, stream);
    return launch_split_kv_plan_few_as<288, kTileTokens, kFixed>(g, cache_seqlens, entries, num_splits, stream);
  }
  const int busy = max_of(g.num_requests, g.num_sm_parts + 1);
  if (busy <= 192)
    return launch_split_kv_plan_as<192, kTileTokens, kFixed>(g, cache_seqlens, entries, num_splits, stream);
  if (busy <= 512)
    return launch_split_kv_plan_as<512, kTileTokens, kFixed>(g, cache_seqlens, entries, num_splits, stream);
  launch_split_kv_plan_as<1024, kTileTokens, kFixed>(g, cache_seqlens, entries, num_splits, stream);
}

// `op` names the caller in errors. kFills: shares are filled where that may be (scheduler/split_kv_fill.h).
// tile_scheduler_metadata is int32 [num_sm_parts, 8], num_splits int32 [B + 1].
// `cache_seqlens[b]` is the length of request b: int32 [B] on the device, or what computes it there.
template <int kTileTokens, bool kFills = false, class Lengths = const int32_t*>
void launch_split_kv_plan(const char* op, const SplitKvGeometry& g, const Lengths& cache_seqlens,
                          int32_t* tile_scheduler_metadata, int32_t* num_splits, cudaStream_t stream) {
  check_batch_fits(op, g.num_requests);
  SplitKvEntry* const entries = reinterpret_cast<SplitKvEntry*>(tile_scheduler_metadata);
  if (g.fixed_split_tiles != 0) {
    launch_split_kv_plan_by_size<kTileTokens, true, false>(g, cache_seqlens, entries, num_splits, stream);
  } else {
    launch_split_kv_plan_by_size<kTileTokens, false, kFills>(g, cache_seqlens, entries, num_splits, stream);
  }
}

}  // namespace attnops
