#pragma once
#include <string>

#include "xqa_decode/sm90/cluster/limits.h"
#include "xqa_decode/sm90/limits.h"

namespace attnops::xqa_decode::sm90 {

// The CTAs of a work: `clusters` clusters of `ctas`. With `small` rings an SM takes three of them, else two.
struct TeamSize {
  int ctas, clusters;
  bool small;

  int shares() const { return ctas * clusters; }
};

inline constexpr int kMaxTeamClusters = 16;
inline constexpr int kMaxTeamRows = 16;
inline constexpr int kMaxTeams = 132;        // pairs, all at the same time
inline constexpr int kMaxShareTokens = 512;  // of a batch, whose requests may differ in length
inline constexpr int kTeamUnitsPerRow = 4;   // of the merge

// How many CTAs take a work, by the works and the tiles that each may have: measured on an H200, which holds 132
// clusters of 2, 62 of 4, 30 of 8 and 14 of 16 at two CTAs per SM, and at three enough of 8 and 16 for 256 CTAs.
inline TeamSize team_size(const Params& p) {
  const int works = p.batch_size * p.num_kv_heads, rows = p.seqlen_q * (p.num_q_heads / p.num_kv_heads);
  const int64_t tiles = (most_visible_tokens(p) + 63) / 64;
  const bool small = rows <= 8;  // more leave too little of a third of an SM
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
  return clusters_can_meet(p, works, size.clusters, kTeamUnitsPerRow) ? size : TeamSize{16, 1, small};
}

// Why the kernels of clusters that multiply by warpgroups do not serve these arguments; "" when they do. Only what the
// host knows: shapes, not lengths.
inline std::string reject_cluster_wgmma(const Params& p) {
  const int works = p.batch_size * p.num_kv_heads, rows = p.seqlen_q * (p.num_q_heads / p.num_kv_heads);
  if (works > kMaxTeams) {
    return "takes batch_size * num_kv_heads up to " + std::to_string(kMaxTeams) + ", got " + std::to_string(works);
  }
  if (rows > kMaxTeamRows) {
    return "takes seqlen_q * group up to " + std::to_string(kMaxTeamRows) + ", got " + std::to_string(rows);
  }
  // One request is divided evenly whatever its length. Others may differ, and then most CTAs wait for the longest's.
  const TeamSize size = team_size(p);
  const bool any_length = p.batch_size == 1 && size.clusters > 1;
  const int64_t most = int64_t{kMaxShareTokens} * size.shares();
  if (!any_length && most_visible_tokens(p) > most) {
    return "takes up to " + std::to_string(most) + " tokens of each of " + std::to_string(works) +
           " (request, KV head), the page table or the window has " + std::to_string(most_visible_tokens(p));
  }
  if (p.fixed_split_tokens != 0) return "takes balanced plans, got fixed_split_tokens";
  return reject(p);
}

}  // namespace attnops::xqa_decode::sm90
