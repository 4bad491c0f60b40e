#pragma once
#include "scheduler/split_kv.h"

namespace attnops::xqa_decode {

// KV tokens per tile of the plan, whatever tile a kernel works in. 64 tokens are small enough that one short request
// spreads over a whole GPU (1024 tokens x 8 heads: 128 tiles), and a multiple of every fast page size's share.
inline constexpr int kPlanTileTokens = 64;

// What a work costs besides its tiles, in eighths of a tile: loading q, the epilogue.
inline constexpr int kWorkOverhead = 4;

inline SplitKvGeometry plan_geometry(int batch_size, int seqlen_q, int num_kv_heads, int window_left, int num_sm_parts,
                                     int fixed_split_tokens) {
  return {.num_requests = batch_size,
          .works_per_request = num_kv_heads,
          .seqlen_q = seqlen_q,
          .tile_tokens = kPlanTileTokens,
          .window_left = window_left,
          .num_sm_parts = num_sm_parts,
          .work_overhead = kWorkOverhead,
          .fixed_split_tiles = fixed_split_tokens / kPlanTileTokens};
}

}  // namespace attnops::xqa_decode
