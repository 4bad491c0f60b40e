#include "mla_decode/plan.h"
#include "mla_decode/sm90/ring/launch.h"

namespace attnops::mla_decode::sm90::ring {

// Where a part may have many tiles of more than 64 rows. The host sees no lengths: the page table's width stands for
// them. In batch-invariant mode the choice, and with it the bits, may depend on nothing that another request changes.
bool suits(const Params& p) {
  constexpr int kManyTiles = 48;       // of a part
  constexpr int kFewestCutTiles = 16;  // of a cut
  const int blocks = blocks_per_request(p.seqlen_q, p.num_q_heads);
  if (p.division.blocks == 1 || p.page_table.kv_indptr != nullptr) return false;
  if (p.fixed_split_tokens != 0) return p.fixed_split_tokens >= kFewestCutTiles * kPlanTileTokens;
  const int64_t tiles = p.page_table.max_pages * p.page_table.page_size / kPlanTileTokens;
  return p.batch_size * blocks * tiles >= static_cast<int64_t>(kManyTiles) * p.num_sm_parts;
}

}  // namespace attnops::mla_decode::sm90::ring
