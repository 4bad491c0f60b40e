#pragma once
#include "xqa_decode/cuda/traits.cuh"

namespace attnops::xqa_decode::sm90 {

// The CTAs of a work: `clusters` clusters of `ctas`, each with one share of the work's tiles. Every CTA of a cluster
// merges `slice` units of eight items. In batch-invariant mode a work has at most `cuts` cuts; 0: one every cut_tiles.
struct Team {
  int ctas, clusters, shares, slice;
  Divisor by_ctas, by_clusters, by_shares, by_slice;
  int cuts, cut_tiles;
  Divisor by_cuts;
};

}  // namespace attnops::xqa_decode::sm90
