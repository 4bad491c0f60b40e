#pragma once
#include "core/math.h"
#include "sparse_indexer/params.h"

namespace attnops::sparse_indexer {

// Rows [first, first + count) of a call: of whole requests, or of one.
inline IndexTopkParams rows_of(const IndexTopkParams& p, int64_t first, int64_t count) {
  IndexTopkParams part = p;
  LogitsParams& logits = part.logits;
  SelectParams& select = part.select;
  const int64_t request = first / logits.seqlen_q;
  logits.q += first * logits.stride_token;
  logits.weights += first * logits.stride_weights;
  logits.cache_seqlens += first;
  if (logits.row_starts != nullptr) logits.row_starts = select.row_starts = logits.row_starts + first;
  logits.page_table += request * logits.stride_table;
  logits.seqlen_q = static_cast<int>(min_of<int64_t>(logits.seqlen_q, count));
  logits.first_row = select.first_row = first;
  logits.first_request = request;
  select.lengths += first;
  select.page_table += request * select.stride_table;
  select.rows_per_request = logits.seqlen_q;
  select.num_requests = count / logits.seqlen_q;
  select.indices += first * select.stride_indices;
  if (select.positions != nullptr) select.positions += first * select.stride_positions;
  logits.num_rows = select.num_rows = count;
  return part;
}

// Calls run(part) for as many rows at a time as the scratch has.
template <class Run>
void for_each_part(const IndexTopkParams& p, const Run& run) {
  const int64_t together = p.logits.seqlen_q;
  for (int64_t row = 0, count = 0; row < p.logits.num_rows; row += count) {
    const int64_t room = min_of(p.rows_at_once, p.logits.num_rows - row), left = together - row % together;
    count = room >= together && left == together ? room - room % together : min_of(room, left);
    run(rows_of(p, row, count));
  }
}

}  // namespace attnops::sparse_indexer
