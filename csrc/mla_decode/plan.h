#pragma once
#include "core/divisor.h"
#include "scheduler/split_kv.h"

namespace attnops::mla_decode {

inline constexpr int kPlanTileTokens = 64;  // KV tokens per tile of the plan
inline constexpr int kPlanRows = 64;      // query rows (token, head) per block: one wgmma tile, one accumulator per SM
inline constexpr int kWorkOverhead = 16;  // what a work costs besides its tiles, in eighths of a tile

// Pieces of works of more rows than this are merged by a second kernel, which takes as long as two tiles: the planner
// then looks whether cuts are worth it.
inline constexpr int kRowsMergedInside = 32, kShortTiles = 2;

// Tiles that a part may have more than its budget, and up to half of it, if then no part has a second piece: that costs
// as much, of few rows as of many (SplitKvGeometry::more_of_lone).
inline constexpr int kMoreOfLone = 2;

ATTNOPS_HOST_DEVICE inline int blocks_per_request(int seqlen_q, int num_q_heads) {
  return ceil_div(seqlen_q * num_q_heads, kPlanRows);
}

// Blocks per work, and parts per group: part p does block p % n of its works. The parts of a group read the same tiles
// at the same time, so that memory serves them once. Pairs are enough for that, but a request may have an odd number of
// blocks: n is the smallest number above one that divides both its blocks and the parts.
inline int blocks_per_work(int seqlen_q, int num_q_heads, int num_sm_parts) {
  constexpr int kMostBlocks = 13;  // groups of more leave too many SMs over
  const int blocks = blocks_per_request(seqlen_q, num_q_heads);
  for (int n = 2; n <= min_of(blocks, kMostBlocks); ++n) {
    if (blocks % n == 0 && num_sm_parts % n == 0) return n;
  }
  return 1;
}

// What follows from the shape of a call, so that nobody on a GPU divides.
struct WorkDivision {
  int blocks = 1;             // of a work
  Divisor by_heads;           // from rows of a request to tokens
  Divisor by_blocks;          // from parts to groups
  Divisor by_works;           // from works to requests
  int works = 1, groups = 1;  // of a request, of parts
};

inline WorkDivision work_division(int seqlen_q, int num_q_heads, int num_sm_parts) {
  const int blocks = blocks_per_work(seqlen_q, num_q_heads, num_sm_parts);
  return {.blocks = blocks,
          .by_heads = Divisor(num_q_heads),
          .by_blocks = Divisor(blocks),
          .by_works = Divisor(blocks_per_request(seqlen_q, num_q_heads) / blocks),
          .works = blocks_per_request(seqlen_q, num_q_heads) / blocks,
          .groups = num_sm_parts / blocks};
}

// The shares among which a batch of works of one length is most likely divided evenly.
inline int likely_shares(int batch_size, const WorkDivision& division) {
  const int64_t works = int64_t{batch_size} * division.works;
  if (works > 0 && works <= division.groups) return static_cast<int>(division.groups / works * works);
  return shares_of_even_works(works, division.groups);
}

inline SplitKvGeometry plan_geometry(int batch_size, int seqlen_q, int num_q_heads, int window_left, int num_sm_parts,
                                     int fixed_split_tokens) {
  const int blocks = blocks_per_work(seqlen_q, num_q_heads, num_sm_parts);
  const int works = blocks_per_request(seqlen_q, num_q_heads) / blocks;
  return {.num_requests = batch_size,
          .works_per_request = works,
          .seqlen_q = seqlen_q,
          .tile_tokens = kPlanTileTokens,
          .window_left = window_left,
          .num_sm_parts = num_sm_parts,
          .work_overhead = kWorkOverhead,
          .fixed_split_tiles = fixed_split_tokens / kPlanTileTokens,
          .parts_per_group = blocks,
          .even_shares = shares_of_even_works(int64_t{batch_size} * works, num_sm_parts / blocks),
          .short_tiles = seqlen_q * num_q_heads > kRowsMergedInside ? kShortTiles : 0,
          .more_of_lone = kMoreOfLone};
}

}  // namespace attnops::mla_decode
