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
// that no warp waits for another, and makes the rows of up to 31 groups of parts: a row needs the next group's
// beginning, too.
template <int kThreads, int kTileTokens, bool kFixed, class Lengths>
__global__ void __launch_bounds__(kThreads)
    split_kv_plan_few_kernel(const __grid_constant__ SplitKvGeometry shape, const Lengths cache_seqlens,
                             SplitKvEntry* __restrict__ entries, int32_t* __restrict__ num_splits) {
  constexpr int kWarps = kThreads / 32;
  __shared__ int64_t prefixes[kWarps][kFewRequests + 1];
  __shared__ int32_t tile_counts[kWarps][kFewRequests];
  __shared__ SplitKvPoint points[kWarps][32];
  SplitKvGeometry g = shape;
  g.tile_tokens = kTileTokens;
  if constexpr (!kFixed) g.fixed_split_tiles = 0;
  const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32;
  int64_t* const prefix = prefixes[warp];
  let_next_kernel_start();  // it waits for this one in any case, and this one for those ahead
  wait_for_earlier_kernels();

  const bool has_request = lane < g.num_requests;
  const int count = has_request ? num_tiles(g, cache_seqlens[lane]) : 0;
  const int first_count = __shfl_sync(~0u, count, 0);
  if (g.even_shares > 0) g.uneven = __any_sync(~0u, has_request && count != first_count);
  const int64_t cost = has_request ? g.works_per_request * work_cost(g, count) : 0;
  int64_t through = warp_inclusive_sum(cost, g.num_requests, lane);
  const int64_t total = __shfl_sync(~0u, through, max_of(g.num_requests - 1, 0));
  const int64_t budget = part_budget(g, total);
  if (!kFixed && (g.short_tiles > 0 || g.more_of_lone > 0)) {
    g.whole = !__any_sync(~0u, count > most_whole_tiles(g, budget));
    g.cuts = cuts_of_works(g, budget, first_count);
    const auto pieces_of = [&](int most) { return g.works_per_request * ceil_div(count, most); };
    g.piece = longest_piece(g, static_cast<int64_t>(__reduce_add_sync(~0u, count)) * g.works_per_request,
                            [&](int most) { return __reduce_add_sync(~0u, pieces_of(most)); });
    if (g.piece > 0) through = warp_inclusive_sum(static_cast<int64_t>(pieces_of(g.piece)), g.num_requests, lane);
  }
  if (has_request) {
    prefix[lane + 1] = through;
    tile_counts[warp][lane] = count;
  }
  if (lane == 0) prefix[0] = 0;
  if (warp == 0) {
    int64_t cuts = 0;
    if constexpr (kFixed) {
      cuts = warp_inclusive_sum(has_request ? int64_t{num_fixed_splits(g, count)} : 0, g.num_requests, lane);
    }
    if (has_request) num_splits[lane + 1] = splits_before(cuts);
    if (lane == 0) num_splits[0] = 0;
  }
  __syncwarp();
  if (!kFixed && warp == 0 && g.num_requests > 0) {
    const int longest = __reduce_max_sync(~0u, count);
    const int shortest = __reduce_min_sync(~0u, has_request ? count : INT32_MAX);
    if (deals_works(g, budget, longest)) {
      const int own = has_request ? dealt_class(count) : -1;
      int place = 0;
      for (int i = 0; i < g.num_requests; ++i) {
        const int other = __shfl_sync(~0u, own, i);
        place += other > own || (other == own && i < lane);
      }
      const int longer = __popc(__ballot_sync(~0u, count > kShortWorkTiles));
      if (has_request) num_splits[place] = lane;
      if (lane == 0) num_splits[g.num_requests] = dealt_word(longer, longest == shortest);
    }
  }
  const SplitKvBatch batch{prefix, tile_counts[warp]};
  const int groups = num_groups(g);
  // Few groups are spread over all warps: what takes time is how many rows a lane makes one after another.
  const int groups_per_warp = min_of(31, (groups + kWarps - 1) / kWarps);
  for (int first = warp * groups_per_warp; first < groups; first += kWarps * groups_per_warp) {
    points[warp][lane] = share_begin(g, batch, budget, min_of(first + lane, groups));
    __syncwarp();
    const int rows = min_of(groups_per_warp, groups - first) * g.parts_per_group;
    for (int row = lane; row < rows; row += 32) {
      const int i = row / g.parts_per_group;
      entries[first * g.parts_per_group + row] =
          split_kv_entry(g, batch, budget, first + i, points[warp][i], points[warp][i + 1]);
    }
    __syncwarp();  // the points are read
  }
}

}  // namespace attnops
