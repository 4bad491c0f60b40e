#pragma once
#include <cmath>
#include <type_traits>

#include "device/common/clusters_at_once.cuh"
#include "mla_decode/sm90/few_rows/launch.cuh"
#include "mla_decode/sm90/fp8_fragments/kernel.cuh"
#include "mla_decode/sm90/fp8_fragments/modes_of.cuh"
#include "mla_decode/sm90/fp8_fragments/wide.cuh"
#include "mla_decode/sm90/raw_query_maps.h"

// Short calls over lists: CTAs that have one piece each, of even lengths, without the plan. Their works are blocks of
// 16 heads or of 64. More CTAs read the same rows for blocks of 16, but their tiles take a third of the time, and a
// piece begins and ends sooner. Beside the plan, whose parts have two pieces mostly, both save what a piece costs.
namespace attnops::mla_decode::sm90::fp8_fragments {

// Into how many pieces a work of so many heads is cut; 0: the call is not short. Whether the pieces of a work are a
// cluster.
struct ShortCuts {
  int count = 0, rows = kShortRows;
  bool cluster = false;
};

// Microseconds as measured. What a call takes beside its tiles: works whole, pieces merged by a cluster, by a grid; by
// the plan, with up to 16 heads, with up to 32, with more. A tile of 16 heads: the first three, more where SMs are
// busy, more of later ones. A tile of the plan's blocks, by heads as before. Blocks of 64 heads: whole, by a grid, a
// tile.
struct ShortTimes {
  float whole, cluster, grid, plan[3], tile, busy, late, plan_tile[3], block_whole, block_grid, block_tile;
};
template <Format kFormat>
inline constexpr ShortTimes kShortTimes =
    kFormat == Format::kShared
        ? ShortTimes{6.3f, 8.f, 9.7f, {9.8f, 9.7f, 13.8f}, 1.1f, 0.3f, 0.77f, {2.4f, 3.f, 3.2f}, 9.f, 12.5f, 2.7f}
        : ShortTimes{6.f, 8.f, 9.7f, {9.9f, 10.7f, 14.2f}, 0.81f, 0.5f, 0.23f, {2.1f, 3.f, 3.3f}, 9.f, 12.5f, 2.8f};
// The host sees no lengths. Where there are some, lists count as such parts of what they could be: those that the plan
// divides evenly, and the longest of the others.
inline constexpr float kEvenPart = 0.45f, kLongestPart = 0.8f;
inline constexpr float kGridPerWork = 0.5f / 16.f;  // more works, more CTAs that merge

// How a call is cut. Batch-invariant plans and prefill are never short: a token's bits may not depend on how many there
// are. `clusters(cuts)` is how many clusters of so many CTAs run at a time.
template <class Clusters>
ShortCuts short_cuts(const Params& p, const ShortTimes& times, const Clusters& clusters) {
  const int64_t blocks = int64_t{p.batch_size} * ceil_div(p.num_q_heads, kPlanRows);
  if (p.tile_scheduler_metadata == nullptr || p.fixed_split_tokens != 0 || blocks > p.num_sm_parts) return {};
  const int tiles = max_of(ceil_div(p.selected.count, kPlanTileTokens) + ceil_div(p.extra.count, kPlanTileTokens), 1);
  const bool some = p.extra.count > 0 ? p.extra.lengths != nullptr : p.selected.lengths != nullptr;
  const int few = p.num_q_heads <= 16 ? 0 : p.num_q_heads <= 32 ? 1 : 2;
  const int plan_tiles = ceil_div(static_cast<int>(blocks) * tiles, p.num_sm_parts);
  ShortCuts best;
  float least =
      times.plan[few] + times.plan_tile[few] * fmaxf(static_cast<float>(plan_tiles) * (some ? kEvenPart : 1.f), 1.f);
  const auto longest = [&](int cuts) {
    return fmaxf(static_cast<float>(ceil_div(tiles, cuts)) * (some ? kLongestPart : 1.f), 1.f);
  };
  const auto take = [&](float time, const ShortCuts& cuts) {
    if (time < least) least = time, best = cuts;
  };
  // The fewest pieces of the shortest length, where that is known.
  const auto even = [&](int most) { return some ? most : ceil_div(tiles, ceil_div(tiles, most)); };
  if (few == 2) {
    const int works = static_cast<int>(blocks), most = min_of(p.num_sm_parts / works, tiles);
    take(times.block_whole + times.block_tile * longest(1), {1, kPlanRows});
    const float merge = kGridPerWork * static_cast<float>(works);
    if (most > 1) take(times.block_grid + merge + times.block_tile * longest(even(most)), {even(most), kPlanRows});
  }
  const int64_t all_works = int64_t{p.batch_size} * ceil_div(p.num_q_heads, kShortRows);
  if (all_works > p.num_sm_parts) return best;
  const int works = static_cast<int>(all_works), most = min_of(p.num_sm_parts / works, tiles);
  const auto consider = [&](int cuts, bool cluster, float start) {
    const float piece = longest(cuts);
    const float tile = times.tile + times.busy * static_cast<float>(works * cuts) / static_cast<float>(p.num_sm_parts);
    take(start + tile * piece + times.late * fmaxf(piece - 3.f, 0.f), {cuts, kShortRows, cluster});
  };
  consider(1, false, times.whole);
  if (most > 1) consider(even(most), false, times.grid + kGridPerWork * static_cast<float>(works));
  // One cluster too many takes as long again as all others. Measured, an H200 holds what seven groups of 16 SMs do, and
  // the driver promises more.
  constexpr int kGroupSms = 16, kSmsPerGroup = 18;
  const int groups = p.num_sm_parts / kSmsPerGroup;
  for (int cuts = min_of(most, kMostInCluster); cuts > 1; --cuts) {
    if (works <= min_of(groups * (kGroupSms / cuts), clusters(cuts))) consider(cuts, true, times.cluster);
  }
  return best;
}

// A call of works of `rows` heads, each in `cuts` pieces (ShortBlock).
inline Params short_call(Params p, int rows, int cuts) {
  const int blocks = ceil_div(p.num_q_heads, rows);
  p.list_cuts = cuts;
  p.num_sm_parts = p.batch_size * blocks * cuts;
  p.tile_scheduler_metadata = nullptr;
  p.division.works = blocks;
  p.division.by_works = Divisor(blocks);
  p.division.by_blocks = Divisor(cuts);
  return p;
}

// What short calls run: over rows of 656 bytes blocks of 16 heads have the kernel without roles.
template <Format kFormat, Cuts kCuts, int kRows, bool kRounds = false>
using ShortShape =
    std::conditional_t<kFormat == Format::kRow && kRows == kShortRows, Shape<kFormat, Options::kSelected, kCuts>,
                       WideShape<kFormat, Options::kSelected, kRows, kCuts, kRounds>>;

template <typename T, class At>
constexpr auto short_kernel() {
  if constexpr (At::kQueriesInRing) {
    return &mla_decode_fp8_wide_kernel<T, At>;
  } else {
    return &mla_decode_fp8_fragments_kernel<T, At>;
  }
}

template <class At>
LaunchShape short_shape(const Params& p, int cuts) {
  constexpr int kBytes = At::kBytes;
  LaunchShape shape{p.num_sm_parts, At::kThreads, kBytes, kBytes};
  if (At::kCluster) shape.cluster = cuts;
  return shape;
}

template <typename T, class At>
void launch_pieces(const Params& p, cudaStream_t stream) {
  constexpr auto kKernel = short_kernel<T, At>();
  const LaunchShape shape = short_shape<At>(p, p.list_cuts);
  const bool aligned = rows_aligned(p.out, size_of(p.dtype), 4, p.out_stride_request, p.out_stride_head);
  if constexpr (At::kQueriesInRing) {
    const WideModes wide{.queries_by_map = queries_fit(p), .out_aligned = aligned};
    WideMaps maps{};
    if (wide.queries_by_map) {
      maps.queries = At::kQueriesByTile ? make_raw_query_maps(p, At::kRows, 1) : make_raw_query_maps(p);
    }
    launch_dependent<kKernel>("mla_decode_fp8_wide_kernel", shape, stream, p, maps, modes_of<At>(p), wide);
  } else {
    launch_dependent<kKernel>("mla_decode_fp8_fragments_kernel", shape, stream, p, CUtensorMap{}, modes_of<At>(p),
                              aligned);
  }
}

template <typename T, class At>
void merge_pieces(const Params& p, cudaStream_t stream) {
  const int works = p.num_sm_parts / p.list_cuts;
  if constexpr (At::kQueriesInRing) {
    // A CTA has as many units as its warps take at a time: more would wait for each other. Up to as many CTAs as run.
    using Merge = UnitMerge<T, 2, 4>;
    constexpr int kCtas = 264, kUnits = At::kRows / 16 * Merge::kUnitsPerRows;
    const int parts = min_of(ceil_div(kUnits * Merge::warps_per_unit(p.list_cuts), kCombineWarps), kCtas / works);
    launch_dependent<&mla_merge_short_units_kernel<T, At::kRows>>(
        "mla_merge_short_units_kernel", {works, kCombineWarps * 32, 0, 0, parts}, stream, p, output_aligned(p));
  } else {
    few_rows::launch_short_merge<T>(p, works, stream);
  }
}

template <typename T, class At>
void launch_short_shape(const Params& given, int cuts, cudaStream_t stream) {
  const Params p = short_call(given, At::kRows, cuts);
  launch_pieces<T, At>(p, stream);
  if (cuts > 1 && !At::kCluster) merge_pieces<T, At>(p, stream);
}

// Launches the call where it is short; false: it is not.
template <typename T, Format kFormat>
bool launch_short(const Params& p, cudaStream_t stream) {
  using InCluster = ShortShape<kFormat, Cuts::kCluster, kShortRows>;
  const ShortCuts cuts = short_cuts(p, kShortTimes<kFormat>, [&](int count) {
    return clusters_at_once<short_kernel<T, InCluster>()>("sparse_mla", short_shape<InCluster>(p, count));
  });
  if (cuts.count == 0) return false;
  if (cuts.cluster) {
    launch_short_shape<T, InCluster>(p, cuts.count, stream);
  } else if (cuts.rows == kShortRows) {
    launch_short_shape<T, ShortShape<kFormat, Cuts::kShort, kShortRows>>(p, cuts.count, stream);
  } else if (kFormat == Format::kRow && rounds_keys(p)) {
    launch_short_shape<T, ShortShape<kFormat, Cuts::kShort, kPlanRows, kFormat == Format::kRow>>(p, cuts.count, stream);
  } else {
    launch_short_shape<T, ShortShape<kFormat, Cuts::kShort, kPlanRows>>(p, cuts.count, stream);
  }
  return true;
}

}  // namespace attnops::mla_decode::sm90::fp8_fragments
