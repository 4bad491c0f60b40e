#pragma once
#include "scheduler/split_kv.h"

namespace attnops::xqa_decode {

// KV tokens per tile of the plan, whatever tile a kernel works in. 64 tokens are small enough that one short request
// spreads over a whole GPU (1024 tokens x 8 heads: 128 tiles), and a multiple of every fast page size's share.
inline constexpr int kPlanTileTokens = 64;

// Splits of a work, at most: the merge counts them in 15 bits (cuda/merge.cuh).
inline constexpr int64_t kMaxSplits = (1 << 15) - 1;

// What a work costs besides its tiles, in eighths of a tile: loading q, the epilogue.
inline constexpr int kWorkOverhead = 4;

// Whether a GPU's parts come in groups of one part for each KV head (SplitKvGeometry::parts_per_group). The heads of a
// request then walk its tiles side by side, and rows that are neighbours in a page are read at about the same time:
// DRAM gives 5 % less for rows of 128 bytes, one head's in FP8, that are read each by itself. Part p is head p % H_kv.
inline bool heads_side_by_side(int num_sm_parts, int num_kv_heads) {
  return num_kv_heads > 1 && num_sm_parts % num_kv_heads == 0;
}

// Tiles from one cut of a work to the next in batch-invariant mode.
ATTNOPS_HOST_DEVICE inline int tiles_of_cut(int fixed_split_tokens, int tiles) {
  return tiles_per_cut(fixed_split_tiles(fixed_split_tokens, kPlanTileTokens), tiles);
}

inline SplitKvGeometry plan_geometry(int batch_size, int seqlen_q, int num_kv_heads, int window_left, int num_sm_parts,
                                     int fixed_split_tokens) {
  return {.num_requests = batch_size,
          .works_per_request = num_kv_heads,
          .seqlen_q = seqlen_q,
          .tile_tokens = kPlanTileTokens,
          .window_left = window_left,
          .num_sm_parts = num_sm_parts,
          .work_overhead = kWorkOverhead,
          .fixed_split_tiles = fixed_split_tiles(fixed_split_tokens, kPlanTileTokens)};
}

// Works of no more tiles stay whole on a GPU, and longer ones where a cut is not worth its merge
// (SplitKvGeometry::short_tiles).
inline constexpr int kShortTiles = 2;

// Parts may take whole works in an order where there are so many for each (SplitKvGeometry::dealt_works).
inline constexpr int kDealtWorks = 4;

// Tiles that a part may have more than its budget, and up to half of it, if then no part has a second piece. The merge
// of a work waits for whoever ends last, and that is who has two.
inline constexpr int kMoreOfLone = 4;

// The same on a GPU: parts in groups, and no cuts that cost more than they save. A merge there takes as long as four
// tiles, beside threads of a CPU next to nothing.
inline SplitKvGeometry gpu_plan_geometry(SplitKvGeometry geometry) {
  geometry.short_tiles = kShortTiles;
  geometry.dealt_works = kDealtWorks;
  geometry.more_of_lone = kMoreOfLone;
  if (heads_side_by_side(geometry.num_sm_parts, geometry.works_per_request)) {
    geometry.parts_per_group = geometry.works_per_request;
    geometry.works_per_request = 1;
  }
  return geometry;
}

}  // namespace attnops::xqa_decode
