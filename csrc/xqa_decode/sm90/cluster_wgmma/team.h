#pragma once
#include "xqa_decode/cuda/traits.cuh"

namespace attnops::xqa_decode::sm90 {

// The CTAs of a work: `clusters` clusters of `ctas`, each with one share of the work's tiles. Every CTA of a cluster
// merges `slice` units of eight items. In batch-invariant mode a work has at most `cuts` cuts, of cut_tiles at least;
// 0: one every cut_tiles. In balanced mode lengths, on the device, decide between teams and the plan's parts.
struct Team {
  int ctas, clusters, shares, slice;
  Divisor by_ctas, by_clusters, by_shares, by_slice;
  int cuts, cut_tiles;
  Divisor by_cuts;
  int most_tiles;  // of a request: where one has more, every CTA does a part of the plan instead; 0: none may
  int lone_tiles;  // works of so many tiles or fewer are for one of their clusters
};

// The same where a work is a block of a request's rows.
struct BlockTeam : Team {
  int row_blocks;
  Divisor by_row_blocks;
};

}  // namespace attnops::xqa_decode::sm90
