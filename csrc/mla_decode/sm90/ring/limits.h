#pragma once
#include "mla_decode/sm90/limits.h"

namespace attnops::mla_decode::sm90::ring {

// Why the ring does not serve a call; null: it does, and where a part may have many tiles of more than 64 rows that is
// faster. The host sees no lengths: the page table's width stands for them. In batch-invariant mode the choice, and
// with it the bits, may depend on nothing that another request changes.
inline const char* unsuited(const Params& p) {
  constexpr int kManyTiles = 48;       // of a part
  constexpr int kFewestCutTiles = 16;  // of a cut
  if (p.division.blocks == 1) return "takes groups of parts with several blocks of 64 query rows (token, head)";
  if (p.page_table.kv_indptr != nullptr) return "takes page_table as a matrix, got kv_indptr";
  if (!boxes_fit(p)) return "takes page_size 64, 128, ..., and no report";
  if (!is_common_or_tree(p, output_aligned(p))) {
    return "takes no window_left, sinks or logit_cap, softmax_scale above 0, rows of q at one distance, rows of out on "
           "16-byte boundaries";
  }
  if (p.fixed_split_tokens != 0) {
    return p.fixed_split_tokens >= kFewestCutTiles * kPlanTileTokens ? nullptr
                                                                     : "takes fixed_split_tokens of 1024 and more";
  }
  const int64_t tiles = p.page_table.max_pages * p.page_table.page_size / kPlanTileTokens;
  const int blocks = blocks_per_request(p.seqlen_q, p.num_q_heads);
  return p.batch_size * blocks * tiles >= static_cast<int64_t>(kManyTiles) * p.num_sm_parts
             ? nullptr
             : "takes page tables with room for 48 tiles a part of the plan";
}

}  // namespace attnops::mla_decode::sm90::ring
