#pragma once
#include <cmath>

#include "device/common/clusters_at_once.cuh"
#include "mla_decode/sm90/few_rows/launch.cuh"
#include "mla_decode/sm90/fp8_fragments/kernel.cuh"
#include "mla_decode/sm90/fp8_fragments/modes_of.cuh"
#include "mla_decode/sm90/fp8_fragments/wide.cuh"
#include "mla_decode/sm90/raw_query_maps.h"

// Short calls over lists: works of 16 heads, which do not outnumber the parts of the plan, without the plan. More CTAs
// then read the same rows, but a tile of 16 heads takes a third of the time that one of 64 does, and a piece begins
// and ends sooner.
namespace attnops::mla_decode::sm90::fp8_fragments {

// Into how many pieces a work is cut; 0: the call is not short. Whether the pieces of a work are a cluster.
struct ShortCuts {
  int count = 0;
  bool cluster = false;
};

// Microseconds as measured. What a call takes beside its tiles: works whole, pieces merged by a cluster, by a grid; by
// the plan, with up to 16 heads, with up to 32, with more. A tile of 16 heads: the first three, more where SMs are
// busy, more of later ones. A tile of the plan's blocks, by heads as before.
struct ShortTimes {
  float whole, cluster, grid, plan[3], tile, busy, late, plan_tile[3];
};
template <Format kFormat>
inline constexpr ShortTimes kShortTimes =
    kFormat == Format::kShared
        ? ShortTimes{6.3f, 8.f, 9.7f, {9.8f, 9.7f, 13.8f}, 1.1f, 0.3f, 0.77f, {2.4f, 3.f, 3.2f}}
        : ShortTimes{6.f, 8.f, 9.7f, {9.9f, 10.7f, 14.2f}, 0.81f, 0.5f, 0.23f, {2.1f, 3.f, 3.3f}};
// The host sees no lengths. Where there are some, lists count as such parts of what they could be: those that the plan
// divides evenly, and the longest of the others.
inline constexpr float kEvenPart = 0.45f, kLongestPart = 0.8f;
inline constexpr float kGridPerWork = 0.5f / 16.f;  // more works, more CTAs that merge

// How a call is cut. Batch-invariant plans and prefill are never short: a token's bits may not depend on how many there
// are. `clusters(cuts)` is how many clusters of so many CTAs run at a time.
template <class Clusters>
ShortCuts short_cuts(const Params& p, const ShortTimes& times, const Clusters& clusters) {
  const int64_t all_works = int64_t{p.batch_size} * ceil_div(p.num_q_heads, kShortRows);
  if (p.tile_scheduler_metadata == nullptr || p.fixed_split_tokens != 0 || all_works > p.num_sm_parts) return {};
  const int tiles = max_of(ceil_div(p.selected.count, kPlanTileTokens) + ceil_div(p.extra.count, kPlanTileTokens), 1);
  const int works = static_cast<int>(all_works), most = min_of(p.num_sm_parts / works, tiles);
  const bool some = p.extra.count > 0 ? p.extra.lengths != nullptr : p.selected.lengths != nullptr;
  const int few = p.num_q_heads <= 16 ? 0 : p.num_q_heads <= 32 ? 1 : 2;
  const int plan_tiles = ceil_div(p.batch_size * ceil_div(p.num_q_heads, kPlanRows) * tiles, p.num_sm_parts);
  ShortCuts best;
  float least =
      times.plan[few] + times.plan_tile[few] * fmaxf(static_cast<float>(plan_tiles) * (some ? kEvenPart : 1.f), 1.f);
  const auto consider = [&](int cuts, bool cluster, float start) {
    const float piece = fmaxf(static_cast<float>(ceil_div(tiles, cuts)) * (some ? kLongestPart : 1.f), 1.f);
    const float tile = times.tile + times.busy * static_cast<float>(works * cuts) / static_cast<float>(p.num_sm_parts);
    const float time = start + tile * piece + times.late * fmaxf(piece - 3.f, 0.f);
    if (time < least) least = time, best = {cuts, cluster};
  };
  consider(1, false, times.whole);
  // The fewest pieces of the shortest length, where that is known.
  const int even = some ? most : ceil_div(tiles, ceil_div(tiles, most));
  if (most > 1) consider(even, false, times.grid + kGridPerWork * static_cast<float>(works));
  // One cluster too many takes as long again as all others. Measured, an H200 holds what seven groups of 16 SMs do, and
  // the driver promises more.
  constexpr int kGroupSms = 16, kSmsPerGroup = 18;
  const int groups = p.num_sm_parts / kSmsPerGroup;
  for (int cuts = min_of(most, kMostInCluster); cuts > 1; --cuts) {
    if (works <= min_of(groups * (kGroupSms / cuts), clusters(cuts))) consider(cuts, true, times.cluster);
  }
  return best;
}

// A call of works of kShortRows heads, each in `cuts` pieces (ShortBlock).
inline Params short_call(Params p, int cuts) {
  const int blocks = ceil_div(p.num_q_heads, kShortRows);
  p.list_cuts = cuts;
  p.num_sm_parts = p.batch_size * blocks * cuts;
  p.tile_scheduler_metadata = nullptr;
  p.division.works = blocks;
  p.division.by_works = Divisor(blocks);
  p.division.by_blocks = Divisor(cuts);
  return p;
}

// The kernels of both formats, as short calls.
template <typename T, Format kFormat, Cuts kCuts>
struct ShortKernel;

template <typename T, Cuts kCuts>
struct ShortKernel<T, Format::kRow, kCuts> {
  using At = Shape<Format::kRow, Options::kSelected, kCuts>;
  static constexpr auto kKernel = &mla_decode_fp8_fragments_kernel<T, At>;

  static void launch(const LaunchShape& shape, const Params& p, bool out_aligned, cudaStream_t stream) {
    launch_dependent<kKernel>("mla_decode_fp8_fragments_kernel", shape, stream, p, CUtensorMap{}, modes_of<At>(p),
                              out_aligned);
  }
  static void merge(const Params& p, cudaStream_t stream) {
    few_rows::launch_short_merge<T>(p, p.num_sm_parts / p.list_cuts, stream);
  }
};

template <typename T, Cuts kCuts>
struct ShortKernel<T, Format::kShared, kCuts> {
  using At = WideShape<Format::kShared, Options::kSelected, kShortRows, kCuts>;
  static constexpr auto kKernel = &mla_decode_fp8_wide_kernel<T, At>;

  static void launch(const LaunchShape& shape, const Params& p, bool out_aligned, cudaStream_t stream) {
    const WideModes wide{.queries_by_map = queries_fit(p), .out_aligned = out_aligned};
    WideMaps maps{};
    if (wide.queries_by_map) maps.queries = make_raw_query_maps(p, kShortRows, 1);
    launch_dependent<kKernel>("mla_decode_fp8_wide_kernel", shape, stream, p, maps, modes_of<At>(p), wide);
  }
  static void merge(const Params& p, cudaStream_t stream) {
    // A CTA has as many units as its warps take at a time; more would wait for each other.
    using Merge = UnitMerge<T, 2, 4>;
    const int parts = ceil_div(Merge::kUnitsPerRows * Merge::warps_per_unit(p.list_cuts), kCombineWarps);
    launch_dependent<&mla_merge_short_units_kernel<T, kShortRows>>(
        "mla_merge_short_units_kernel", {p.num_sm_parts / p.list_cuts, kCombineWarps * 32, 0, 0, parts}, stream, p,
        output_aligned(p));
  }
};

template <class At>
LaunchShape short_shape(const Params& p, int cuts) {
  constexpr int kBytes = At::kBytes;
  LaunchShape shape{p.num_sm_parts, At::kThreads, kBytes, kBytes};
  if (At::kCluster) shape.cluster = cuts;
  return shape;
}

template <typename T, Format kFormat, Cuts kCuts>
void launch_short_cuts(const Params& given, int cuts, cudaStream_t stream) {
  using Kernel = ShortKernel<T, kFormat, kCuts>;
  const Params p = short_call(given, cuts);
  const bool aligned = rows_aligned(p.out, size_of(p.dtype), 4, p.out_stride_request, p.out_stride_head);
  Kernel::launch(short_shape<typename Kernel::At>(p, cuts), p, aligned, stream);
  if (cuts > 1 && kCuts == Cuts::kShort) Kernel::merge(p, stream);
}

// Launches the call where it is short; false: it is not.
template <typename T, Format kFormat>
bool launch_short(const Params& p, cudaStream_t stream) {
  using InCluster = ShortKernel<T, kFormat, Cuts::kCluster>;
  const ShortCuts cuts = short_cuts(p, kShortTimes<kFormat>, [&](int count) {
    return clusters_at_once<InCluster::kKernel>("sparse_mla", short_shape<typename InCluster::At>(p, count));
  });
  if (cuts.count == 0) return false;
  if (cuts.cluster) {
    launch_short_cuts<T, kFormat, Cuts::kCluster>(p, cuts.count, stream);
  } else {
    launch_short_cuts<T, kFormat, Cuts::kShort>(p, cuts.count, stream);
  }
  return true;
}

}  // namespace attnops::mla_decode::sm90::fp8_fragments
