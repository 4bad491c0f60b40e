#pragma once
#include "xqa_decode/cuda/traits.cuh"

namespace attnops::xqa_decode::sm90 {

// The CTAs of a work: `clusters` clusters of `ctas`, each with one share of the work's tiles. Every CTA of a cluster
// merges `slice` units of eight items.
struct Team {
  int ctas, clusters, shares, slice;
  Divisor by_ctas, by_clusters, by_shares, by_slice;
};

}  // namespace attnops::xqa_decode::sm90
