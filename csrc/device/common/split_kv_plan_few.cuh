#pragma once
#include "core/math.h"
#include "device/common/pdl.cuh"
#include "scheduler/split_kv.h"

namespace attnops {

inline constexpr int kFewRequests = 32;

// The sum of `value` over the lanes up to this one, in the first `count` lanes.
template <typename T>
__device__ T warp_inclusive_sum(T value, int count, int lane) {
  for (int step = 1; step < count; step *= 2) {
    const T other = __shfl_up_sync(~0u, value, step);
    if (lane >= step) value += other;
  }
  return value;
}

// split_kv_plan_kernel for batches that a warp holds, a request per lane. Every warp adds the costs up for itself, so
// that no warp waits for another, and makes the rows of 31 parts: a row needs the next part's beginning, too.
template <int kThreads, int kTileTokens, bool kFixed>
__global__ void __launch_bounds__(kThreads)
    split_kv_plan_few_kernel(const __grid_constant__ SplitKvGeometry shape, const int32_t* __restrict__ cache_seqlens,
                             SplitKvEntry* __restrict__ entries, int32_t* __restrict__ num_splits) {
  constexpr int kWarps = kThreads / 32;
  __shared__ int64_t prefixes[kWarps][kFewRequests + 1];
  __shared__ int32_t tile_counts[kWarps][kFewRequests];
  SplitKvGeometry g = shape;
  g.tile_tokens = kTileTokens;
  if constexpr (!kFixed) g.fixed_split_tiles = 0;
  const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32;
  int64_t* const prefix = prefixes[warp];
  let_next_kernel_start();  // it waits for this one in any case, and this one for those ahead
  wait_for_earlier_kernels();

  const bool has_request = lane < g.num_requests;
  const int count = has_request ? num_tiles(g, cache_seqlens[lane]) : 0;
  const int64_t cost = has_request ? g.works_per_request * work_cost(g, count) : 0;
  const int64_t through = warp_inclusive_sum(cost, g.num_requests, lane);
  const int64_t total = __shfl_sync(~0u, through, max_of(g.num_requests - 1, 0));
  if (has_request) {
    prefix[lane + 1] = through;
    tile_counts[warp][lane] = count;
  }
  if (lane == 0) prefix[0] = 0;
  if (warp == 0) {
    int cuts = 0;
    if constexpr (kFixed) {
      cuts = warp_inclusive_sum(has_request ? num_fixed_splits(g, count) : 0, g.num_requests, lane);
    }
    if (has_request) num_splits[lane + 1] = cuts;
    if (lane == 0) num_splits[0] = 0;
  }
  __syncwarp();
  const int64_t budget = part_budget(g, total);
  const SplitKvBatch batch{prefix, tile_counts[warp]};
  const int groups = num_groups(g);
  for (int first = warp * 31; first < groups; first += kWarps * 31) {
    const int part = first + lane;
    const SplitKvPoint begin = point_at(g, batch, min_of(part, groups) * budget);
    const SplitKvPoint end = {__shfl_down_sync(~0u, begin.work, 1), __shfl_down_sync(~0u, begin.tile, 1)};
    if (part >= groups || lane == 31) continue;
    const SplitKvEntry entry = split_kv_entry(g, batch, budget, part, begin, end);
    for (int i = 0; i < g.parts_per_group; ++i) entries[part * g.parts_per_group + i] = entry;
  }
}

}  // namespace attnops
