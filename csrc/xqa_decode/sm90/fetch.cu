#include <climits>

#include "core/types.h"
#include "xqa_decode/plan.h"
#include "xqa_decode/sm90/fetch.h"

namespace attnops::xqa_decode::sm90 {

Fetch choose_fetch(const Params& p) {
  const bool whole_rows = p.head_dim * size_of(p.kv_dtype) % 128 == 0;
  Fetch fetch{true, INT_MAX};
  // Rows that are no whole lines share some with those of the next head. Where heads do not walk side by side, what
  // lies beside a row is gone from L2 before its head wants it.
  if (!whole_rows && p.num_kv_heads > 1) fetch.whole_lines = heads_side_by_side(p.num_sm_parts, p.num_kv_heads);
  // Heads must not drift apart, or DRAM is read twice. Measured over heads side by side, two, three and four units: d
  // 80 197, 172, 206 us; d 112 242, 260, 286; over e4m3 pages d 96 142, 135, 150 us; d 112 155, 170, 177.
  const bool heads_share_lines = p.num_kv_heads > 1 && p.k_stride_head < p.k_stride_token;
  if (p.head_dim > 64 && p.head_dim < 128 && heads_share_lines) fetch.most_units = p.head_dim <= 96 ? 3 : 2;
  return fetch;
}

}  // namespace attnops::xqa_decode::sm90
