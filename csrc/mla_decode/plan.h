#pragma once
#include "scheduler/split_kv.h"

namespace attnops::mla_decode {

inline constexpr int kPlanTileTokens = 64;  // KV tokens per tile of the plan
inline constexpr int kPlanRows = 64;        // query rows (token, head) per work: one wgmma tile, one accumulator per SM
inline constexpr int kWorkOverhead = 16;    // what a work costs besides its tiles, in eighths of a tile

inline int works_per_request(int seqlen_q, int num_q_heads) { return ceil_div(seqlen_q * num_q_heads, kPlanRows); }

inline SplitKvGeometry plan_geometry(int batch_size, int seqlen_q, int num_q_heads, int window_left, int num_sm_parts,
                                     int fixed_split_tokens) {
  return {.num_requests = batch_size,
          .works_per_request = works_per_request(seqlen_q, num_q_heads),
          .seqlen_q = seqlen_q,
          .tile_tokens = kPlanTileTokens,
          .window_left = window_left,
          .num_sm_parts = num_sm_parts,
          .work_overhead = kWorkOverhead,
          .fixed_split_tiles = fixed_split_tokens / kPlanTileTokens};
}

}  // namespace attnops::mla_decode
