#pragma once
#include <stdexcept>

#include "device/common/clusters_at_once.cuh"
#include "xqa_decode/sm90/cluster_wgmma/kernel.cuh"
#include "xqa_decode/sm90/cluster_wgmma/launch.h"
#include "xqa_decode/sm90/cluster_wgmma/limits.h"
#include "xqa_decode/sm90/launch.cuh"

namespace attnops::xqa_decode::sm90 {

inline Team make_team(const Params& p, const TeamSize& size, int rows) {
  Team team{};
  team.ctas = size.ctas, team.clusters = size.clusters, team.shares = size.shares();
  team.slice = ceil_div(rows * team_units_per_row(p.head_dim), team.ctas);
  team.by_ctas = Divisor(team.ctas);
  team.by_clusters = Divisor(team.clusters);
  team.by_shares = Divisor(team.shares);
  team.by_slice = Divisor(team.slice);
  team.most_tiles = most_team_tiles(p, size), team.lone_tiles = lone_tiles(size);
  if (p.fixed_split_tokens != 0) {
    const int fixed = fixed_split_tiles(p.fixed_split_tokens, kPlanTileTokens);
    const CutRule rule(min_of(fixed, -1));
    team.cuts = fixed > 0 ? 0 : rule.most, team.cut_tiles = fixed > 0 ? fixed : rule.least;
    team.by_cuts = Divisor(rule.most);
  }
  return team;
}

template <class Tr>
void launch_team_rows(const Params& p, TeamSize size, cudaStream_t stream) {
  // Over e4m3 pages a tile takes the time of its instructions, of which the compiler makes more beside another loop.
  if constexpr (Tr::kFp8 && !Tr::kGathers && kMayBeLong<Tr>) {
    if (!device_chooses(p)) return launch_team_rows<ShortTraits<Tr>>(p, size, stream);
  }
  constexpr const char* kWhat = "xqa_decode (clusters, wgmma)";
  constexpr int kBytes = SharedLayout<Tr>::kBytes;
  constexpr auto kKernel = &xqa_cluster_wgmma_kernel<Tr>;
  // Other devices than an H200 may not hold the largest clusters.
  const auto held = [](int ctas) {
    LaunchShape shape{ctas, Tr::kAllThreads, kBytes, kBytes};
    shape.cluster = ctas;
    return clusters_at_once<kKernel, kMaxClusterCtas>(kWhat, shape) > 0;
  };
  while (size.ctas > 1 && !held(size.ctas)) size.ctas /= 2;
  if (Tr::kFolds && most_leaves(p) > int64_t{size.shares()} << Tr::kFoldLevels) {
    throw std::runtime_error(
        "attnops::xqa_decode: this device holds no clusters that take the cuts of fixed_split_tokens " +
        std::to_string(p.fixed_split_tokens) + ": allocate the plan with fewer");
  }
  const Shape shape = make_shape(p, Tr::kRows, 1);
  const Boxes boxes = make_boxes<Tr>(p);
  const Team team = make_team(p, size, shape.rows);
  const CUtensorMap keys = make_map<Tr>(p, p.k_pages, p.k_stride_token, p.k_stride_head, p.k_stride_page);
  const CUtensorMap values = make_map<Tr>(p, p.v_pages, p.v_stride_token, p.v_stride_head, p.v_stride_page);
  const int ctas = p.batch_size * p.num_kv_heads * team.shares;
  const int most_ctas = team.most_tiles == 0 ? ctas : max_of(ctas, round_up(p.num_sm_parts, team.ctas));
  LaunchShape launch{most_ctas, Tr::kAllThreads, kBytes, kBytes};
  launch.cluster = team.ctas;
  launch_dependent<kKernel>(kWhat, launch, stream, p, shape, boxes, team, keys, values);
}

// Blocks of rows.
template <class Tr>
void launch_team_blocks(const Params& p, cudaStream_t stream) {
  constexpr int kTeamBytes = SharedLayout<Tr>::kBytes, kPartBytes = SharedLayout<PartTraits<Tr>>::kBytes;
  constexpr int kBytes = max_of(kTeamBytes, kPartBytes);
  constexpr const char* kWhat = "xqa_decode (clusters, blocks of rows)";
  constexpr auto kKernel = &xqa_cluster_blocks_kernel<Tr>;
  if (p.batch_size == 0) return;
  BlockTeams teams(p);
  // Other devices than an H200 may not hold the largest clusters.
  const auto held = [](int ctas) {
    LaunchShape shape{ctas, Tr::kAllThreads, kBytes, kBytes};
    shape.cluster = ctas;
    return clusters_at_once<kKernel, kMaxClusterCtas>(kWhat, shape) > 0;
  };
  while (teams.size.ctas > 1 && !held(teams.size.ctas)) teams.size.ctas /= 2;
  const Shape shape = make_shape(p, PartTraits<Tr>::kRows, 1);
  Boxes boxes = make_boxes<Tr>(p);
  boxes.units_of_long = min_of(boxes.units_of_long, PartTraits<Tr>::kUnitsOfLong);  // a team has all of its ring
  BlockTeam team{make_team(p, teams.size, min_of(shape.rows, Tr::kRows)), teams.blocks, Divisor(teams.blocks)};
  team.most_tiles = teams.most_tiles;
  const CUtensorMap keys = make_map<Tr>(p, p.k_pages, p.k_stride_token, p.k_stride_head, p.k_stride_page);
  const CUtensorMap values = make_map<Tr>(p, p.v_pages, p.v_stride_token, p.v_stride_head, p.v_stride_page);
  const int ctas = teams.works * team.shares;
  const int most_ctas = team.most_tiles == 0 ? ctas : max_of(ctas, round_up(p.num_sm_parts, team.ctas));
  LaunchShape launch{most_ctas, Tr::kAllThreads, kBytes, kBytes};
  launch.cluster = team.ctas;
  launch_dependent<kKernel>(kWhat, launch, stream, p, shape, boxes, team, keys, values);
}

// Slices are whole units, so that those of all CTAs may be some units more than the rows have.
template <int kHeadDim>
constexpr int team_inbox_bytes(int rows, int more_units) {
  return (rows * team_units_per_row(kHeadDim) + more_units) * kUnitItems * 24;
}

// Rings are larger where shares are one leaf or two.
template <typename T, typename Element, bool kGathers, int kRows, int kMoreUnits, int kMostCtas>
void launch_folding_rows(const Params& p, TeamSize size, cudaStream_t stream) {
  constexpr int kInbox = team_inbox_bytes<128>(kRows, kMoreUnits);
  if (most_leaves(p) <= 2 * int64_t{size.shares()}) {
    return launch_team_rows<Traits<T, 128, kRows, kInbox, kMostCtas, kGathers, 1, Element>>(p, size, stream);
  }
  launch_team_rows<Traits<T, 128, kRows, kInbox, kMostCtas, kGathers, kLogMostRun, Element>>(p, size, stream);
}

template <typename T, bool kGathers, typename Element>
void launch_folding_team(const Params& p, cudaStream_t stream) {
  const TeamSize size = invariant_team_size(p);
  const bool many = p.seqlen_q * (p.num_q_heads / p.num_kv_heads) > 8;
  if (many) return launch_folding_rows<T, Element, kGathers, 16, 16, 2>(p, size, stream);
  if (size.small) return launch_folding_rows<T, Element, kGathers, 8, 0, 3>(p, size, stream);
  launch_folding_rows<T, Element, kGathers, 8, 16, 2>(p, size, stream);
}

template <typename T, int kHeadDim, bool kGathers = false, typename Element = T>
void launch_cluster_blocks(const Params& p, cudaStream_t stream) {
  constexpr int kInbox = team_inbox_bytes<kHeadDim>(BlockTeams::kRows, 16);
  using OfTeam = Traits<T, kHeadDim, BlockTeams::kRows, kInbox, 2, kGathers, kNoFold, Element>;
  if constexpr (sizeof(Element) == 1) {
    launch_team_blocks<ShortTraits<OfTeam>>(p, stream);
  } else {
    using OfPart = Traits<T, kHeadDim, kMostRowsOfParts, 0, 2, kGathers, kNoFold, Element>;
    launch_team_blocks<BlockTraits<OfTeam, OfPart>>(p, stream);
  }
}

// Whether batch-invariant calls have clusters: where the kernels of the plan fold, too.
template <int kHeadDim, bool kGathers, typename Element>
inline constexpr bool kTeamsFold = kHeadDim == 128 && !(kGathers && sizeof(Element) == 1);

template <typename T, int kHeadDim, bool kGathers = false, typename Element = T>
void launch_cluster_wgmma(const Params& p, cudaStream_t stream) {
  if (p.batch_size == 0) return;
  if constexpr (kTeamsFold<kHeadDim, kGathers, Element>) {
    if (p.fixed_split_tokens != 0) return launch_folding_team<T, kGathers, Element>(p, stream);
  }
  const TeamSize size = team_size(p);
  const int rows = p.seqlen_q * (p.num_q_heads / p.num_kv_heads);
  constexpr auto inbox = &team_inbox_bytes<kHeadDim>;
  if constexpr (sizeof(Element) == 2 && kHeadDim <= 128) {
    if (rows > 16) {
      return launch_team_rows<Traits<T, kHeadDim, 32, inbox(32, 16), 2, kGathers, kNoFold, Element>>(p, size, stream);
    }
  }
  if (rows > 8) {
    return launch_team_rows<Traits<T, kHeadDim, 16, inbox(16, 16), 2, kGathers, kNoFold, Element>>(p, size, stream);
  }
  if constexpr (kHeadDim <= 128) {
    if (size.small) {
      return launch_team_rows<Traits<T, kHeadDim, 8, inbox(8, 0), 3, kGathers, kNoFold, Element>>(p, size, stream);
    }
  }
  launch_team_rows<Traits<T, kHeadDim, 8, inbox(8, 16), 2, kGathers, kNoFold, Element>>(p, size, stream);
}

}  // namespace attnops::xqa_decode::sm90
