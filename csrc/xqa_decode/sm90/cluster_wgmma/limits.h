#pragma once
#include <string>

#include "xqa_decode/plan.h"
#include "xqa_decode/sm90/limits.h"

namespace attnops::xqa_decode::sm90 {

// The CTAs of a work: `clusters` clusters of `ctas`. With `small` rings an SM takes three of them, else two.
struct TeamSize {
  int ctas, clusters;
  bool small;

  int shares() const { return ctas * clusters; }
};

inline constexpr int kMaxClusterCtas = 16;
inline constexpr int kMaxTeamClusters = 16;
// Rows of 16-bit pages; of FP8 pages and of kernels that fold: the plan's kernels are 5 % faster with more over FP8.
// Above head dim 128 more leave an SM room for one CTA.
inline constexpr int kMaxTeamRows = 32, kMaxFewTeamRows = 16;
inline constexpr int kMaxTeams = 132;        // pairs, all at the same time
inline constexpr int kMaxShareTokens = 512;  // of a batch, whose requests may differ in length

// What the merge counts in: a unit is eight items of a row, an item what a lane holds of it, four values at most.
inline constexpr int kUnitItems = 8;
constexpr int team_units_per_row(int head_dim) { return head_dim > 128 ? 8 : 4; }

// Where a work has several clusters, their results meet in memory, a unit at a time. Whether the plan has what that
// takes: a semaphore per unit, and room among the partial results.
inline bool clusters_can_meet(const Params& p, int works, int clusters) {
  const int64_t rows = p.seqlen_q * (p.num_q_heads / p.num_kv_heads);
  const int64_t units = rows * team_units_per_row(p.head_dim), records = units * works * clusters;
  return p.num_semaphores >= units * works && p.num_partials * rows >= records &&
         p.num_partials * rows * p.head_dim >= records * kUnitItems * 4;
}

// How many CTAs take a work whose length is known to be short, by the works and the tiles that each may have: measured
// on an H200, which holds 132 clusters of 2, 62 of 4, 30 of 8 and 14 of 16 at two CTAs per SM, and at three enough of 8
// and 16 for 256 CTAs.
inline TeamSize short_team_size(const Params& p, int works, int rows) {
  const int64_t tiles = max_of<int64_t>((most_visible_tokens(p) + 63) / 64, 1);  // of a table without a cell, too
  const bool small = rows <= 8 && p.head_dim <= 128;  // more leave too little of a third of an SM
  if (works > 62) return {2, 1, false};
  if (works > (small ? 32 : 30)) return {4, 1, false};
  if (works > (small ? 16 : 14)) return {8, 1, small};
  TeamSize size{16, 1, small};
  if (!small || works > 8) return size;
  // Few works: several clusters each, which meet in memory, where that saves every CTA some tiles.
  if (works > 4) {
    if (tiles > 64) size = {8, 40 / works, true};
  } else {
    const int most = min_of(16 / works, kMaxTeamClusters);
    size.clusters = static_cast<int>(min_of<int64_t>((tiles + 15) / 16, most));
  }
  return clusters_can_meet(p, works, size.clusters) ? size : TeamSize{16, 1, small};
}
inline TeamSize short_team_size(const Params& p) {
  return short_team_size(p, p.batch_size * p.num_kv_heads, p.seqlen_q * (p.num_q_heads / p.num_kv_heads));
}

// Whether some request may have more tokens than the CTAs of a work should take: requests differ in length then, and
// most CTAs wait for the longest's. One request alone is divided evenly whatever its length.
inline bool may_be_long(const Params& p, const TeamSize& size) {
  const bool any_length = p.batch_size == 1 && size.clusters > 1;
  return !any_length && most_visible_tokens(p) > int64_t{kMaxShareTokens} * size.shares();
}

// Whether lengths decide, on the device, between teams and the plan's parts.
inline bool device_chooses(const Params& p) { return p.fixed_split_tokens == 0 && may_be_long(p, short_team_size(p)); }

// The teams of a call. Where they may have to do the plan's parts instead they are pairs: larger clusters are crowded
// into fewer SMs, which makes parts slower by 10 to 50 %, and several pairs of a work meet in memory, at up to 5 us.
inline TeamSize team_size(const Params& p) { return device_chooses(p) ? TeamSize{2, 1, false} : short_team_size(p); }

// Up to so many tiles a work stays with one of its clusters: a meeting in memory costs as much as two or three tiles.
inline int lone_tiles(const TeamSize& size) { return size.clusters == 1 ? 0 : (size.ctas == 16 ? 1 : 4) * size.ctas; }

// Tiles of a request beyond which the parts of the plan are faster, where some may have more; 0: none. Few pairs leave
// most SMs idle: the plan is faster sooner.
inline constexpr int kFewTeams = 16;
inline int most_team_tiles(const Params& p, const TeamSize& size, int works, bool chooses) {
  const int tokens = works > kFewTeams ? kMaxShareTokens : kMaxShareTokens / 2;
  const int most = tokens / kPlanTileTokens * size.shares();
  return chooses && most_visible_tokens(p) > int64_t{kPlanTileTokens} * most ? most : 0;
}
inline int most_team_tiles(const Params& p, const TeamSize& size) {
  return most_team_tiles(p, size, p.batch_size * p.num_kv_heads, device_chooses(p));
}

// More rows than a team has in one pass, of a short call, are blocks of so many, each with a team: its tiles then take
// a third of the time, and its merge goes through shared memory. Keys are read once more for each block, from L2.
struct BlockTeams {
  static constexpr int kRows = 16;
  int blocks, works;
  TeamSize size;
  bool device_chooses;
  int most_tiles;

  explicit BlockTeams(const Params& p)
      : blocks(ceil_div(p.seqlen_q * (p.num_q_heads / p.num_kv_heads), kRows)),
        works(p.batch_size * p.num_kv_heads * blocks),
        size(short_team_size(p, works, kRows)),
        device_chooses(may_be_long(p, size)) {
    if (device_chooses) size = {2, 1, false};
    most_tiles = most_team_tiles(p, size, works, device_chooses);
  }
};

// Batch-invariant calls (fold.cuh): how many leaves a work may have, and a CTA of a cluster may take.
inline constexpr int kLogMostRun = 3;
inline constexpr int kMostLeaves = 256;  // more are not added up as a tree in memory

inline int64_t most_leaves(const Params& p) {
  const int fixed = fixed_split_tiles(p.fixed_split_tokens, kPlanTileTokens);
  const int64_t tiles = max_of<int64_t>((most_visible_tokens(p) + 63) / 64, 1);
  return fixed > 0 ? ceil_div(tiles, int64_t{fixed}) : min_of(tiles, int64_t{CutRule(fixed).most});
}

// As team_size, but shares are runs of 2^n leaves.
inline TeamSize invariant_team_size(const Params& p) {
  const int works = p.batch_size * p.num_kv_heads, rows = p.seqlen_q * (p.num_q_heads / p.num_kv_heads);
  const int64_t leaves = most_leaves(p), tiles = (most_visible_tokens(p) + 63) / 64;
  const bool small = rows <= 8;
  if (works > 62) return {2, 1, false};
  if (works > (small ? 32 : 30)) return {4, 1, false};
  if (works > (small ? 16 : 14)) return {8, 1, small && leaves <= 16};
  TeamSize size{16, 1, small};
  if (!small || works > 8) return size;
  if (works > 4) {
    if (tiles > 32) size = {4, 7, false};
  } else {
    size.clusters = static_cast<int>(min_of<int64_t>((leaves + 15) / 16, 16 / works));
  }
  return size.clusters == 1 || clusters_can_meet(p, works, size.clusters) ? size : TeamSize{16, 1, small};
}

// Why clusters that multiply by warpgroups do not suit these arguments, whatever their pages; "" when they do. Only
// what the host knows: shapes, not lengths.
inline std::string reject_team(const Params& p) {
  const int works = p.batch_size * p.num_kv_heads, rows = p.seqlen_q * (p.num_q_heads / p.num_kv_heads);
  if (works == 0) return "takes at least one request, got none";
  if (works > kMaxTeams) {
    return "takes batch_size * num_kv_heads up to " + std::to_string(kMaxTeams) + ", got " + std::to_string(works);
  }
  const bool few = p.fixed_split_tokens != 0 || size_of(p.kv_dtype) == 1 || p.head_dim > 128;
  const int most_rows = few ? kMaxFewTeamRows : kMaxTeamRows;
  if (rows > most_rows) {
    return "takes seqlen_q * group up to " + std::to_string(most_rows) + ", got " + std::to_string(rows);
  }
  if (device_chooses(p)) return "";
  const TeamSize size = p.fixed_split_tokens != 0 ? invariant_team_size(p) : team_size(p);
  if (may_be_long(p, size)) {
    return "takes up to " + std::to_string(kMaxShareTokens * size.shares()) + " tokens of each of " +
           std::to_string(works) + " (request, KV head), the page table or the window has " +
           std::to_string(most_visible_tokens(p));
  }
  const int leaves = min_of(size.shares() << kLogMostRun, kMostLeaves);
  if (p.fixed_split_tokens != 0 && most_leaves(p) > leaves) {
    return "takes up to " + std::to_string(leaves) + " cuts of a work, fixed_split_tokens " +
           std::to_string(p.fixed_split_tokens) + " may make " + std::to_string(most_leaves(p));
  }
  return "";
}

inline std::string reject_cluster_wgmma(const Params& p) {
  const std::string reason = reject_team(p);
  return reason.empty() ? reject_boxes(p) : reason;
}

// Those that do not fold.
inline std::string reject_balanced_cluster(const Params& p) {
  return p.fixed_split_tokens == 0 ? reject_cluster_wgmma(p) : "takes balanced plans, got fixed_split_tokens";
}

// Blocks of rows of 16-bit pages. Where lengths decide, the kernel has parts of the plan, too, for so many rows. They
// cost long calls 4 %, and 16 % over e4m3 pages, whose kernels therefore have none.
inline constexpr int kMostRowsOfParts = 64;

// Tokens of a CTA's share, at most: measured. Up to 32 rows have clusters of their own over 16-bit pages, which read
// keys once. Over e4m3 pages every block converts them anew.
constexpr int most_block_tokens(bool fp8, int rows) {
  const bool few = rows <= kMaxTeamRows;
  if (fp8) return kMaxShareTokens / (few ? 2 : 4);
  return few ? kMaxShareTokens / 2 : kMaxShareTokens;
}

inline std::string reject_team_blocks(const Params& p) {
  const int rows = p.seqlen_q * (p.num_q_heads / p.num_kv_heads);
  if (p.batch_size == 0) return "takes at least one request, got none";
  if (p.fixed_split_tokens != 0) return "takes balanced plans, got fixed_split_tokens";
  if (rows <= BlockTeams::kRows || rows > kMaxTeams * BlockTeams::kRows) {
    return "takes seqlen_q * group above 16, got " + std::to_string(rows);
  }
  const BlockTeams teams(p);
  if (teams.works > kMaxTeams) {
    return "takes up to " + std::to_string(kMaxTeams) + " (request, KV head, 16 rows), got " +
           std::to_string(teams.works);
  }
  const bool fp8 = size_of(p.kv_dtype) == 1;
  if (!fp8 && rows > kMaxTeamRows && rows <= kMostRowsOfParts) return "";
  const int most = most_block_tokens(fp8, rows) * teams.size.shares();
  if (teams.device_chooses || most_visible_tokens(p) > most) {
    return "takes up to " + std::to_string(most) + " tokens of each of " + std::to_string(rows) +
           " rows, the page table or the window has " + std::to_string(most_visible_tokens(p));
  }
  return "";
}

inline std::string reject_cluster_blocks(const Params& p) {
  const std::string reason = reject_team_blocks(p);
  return reason.empty() ? reject_boxes(p) : reason;
}

inline std::string reject_cluster_blocks_gather(const Params& p) {
  const std::string reason = reject_team_blocks(p);
  return reason.empty() ? reject_gather(p) : reason;
}

// Those that gather rows.
inline std::string reject_cluster_gather(const Params& p) {
  const std::string reason = reject_team(p);
  return reason.empty() ? reject_gather(p) : reason;
}

inline std::string reject_balanced_cluster_gather(const Params& p) {
  return p.fixed_split_tokens == 0 ? reject_cluster_gather(p) : "takes balanced plans, got fixed_split_tokens";
}

}  // namespace attnops::xqa_decode::sm90
