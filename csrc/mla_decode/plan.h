#pragma once
#include "scheduler/split_kv.h"

namespace attnops::mla_decode {

inline constexpr int kPlanTileTokens = 64;  // KV tokens per tile of the plan
inline constexpr int kPlanRows = 64;      // query rows (token, head) per block: one wgmma tile, one accumulator per SM
inline constexpr int kWorkOverhead = 16;  // what a work costs besides its tiles, in eighths of a tile

ATTNOPS_HOST_DEVICE inline int blocks_per_request(int seqlen_q, int num_q_heads) {
  return ceil_div(seqlen_q * num_q_heads, kPlanRows);
}

// Blocks per work, and parts per group: part p does block p % 2 of its works. Blocks pair up where a request has an
// even number of them and parts do, too; the two parts of a pair then read the same tiles at the same time.
ATTNOPS_HOST_DEVICE inline int blocks_per_work(int seqlen_q, int num_q_heads, int num_sm_parts) {
  return blocks_per_request(seqlen_q, num_q_heads) % 2 == 0 && num_sm_parts % 2 == 0 ? 2 : 1;
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
          .even_shares = shares_of_even_works(int64_t{batch_size} * works, num_sm_parts / blocks)};
}

}  // namespace attnops::mla_decode
