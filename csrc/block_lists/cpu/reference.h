#pragma once
#include "block_lists/params.h"

namespace attnops::block_lists::cpu {

// One row of one KV head.
inline void build_row(const Params& p, int64_t index, int64_t head) {
  const Row row = row_of(p, index);
  const int32_t* const list = p.block_list + row.request * p.list_stride_request + head * p.list_stride_head;
  const int32_t* const pages = p.page_table.row(row.request);
  int32_t* const table = p.tables + index * p.table_stride_row + head * p.table_stride_head;
  const int64_t room = blocks_with_room(p, row);
  const auto write = [&](int64_t cell, int64_t first_unit, int64_t units) {
    for (int64_t i = 0; i < units; ++i) table[cell + i] = cell_of(p, pages, row.request, head, first_unit + i);
  };

  bool in_tail = row.whole_tail, in_cut = false;
  int64_t count = 0;
  for (int64_t i = 0; i < p.num_blocks; ++i) {
    if (!stands_before_tail(p, row, head, i, list[i], in_tail, in_cut)) continue;
    if (count < room) write(count * p.units_per_block, list[i] * p.units_per_block, p.units_per_block);
    ++count;
  }
  const int64_t tail = in_tail ? tail_units(p, row) : 0, whole = min_of(count, room);
  const int64_t cut = in_cut ? cut_units(p, row) : 0, first = whole * p.units_per_block + cut;
  write(first - cut, row.first_key, cut);  // there is no window where room may lack
  if (first + tail <= p.num_cells) write(first, tail_unit(p, row), tail);
  report_room(p, row, head, count, tail);
  p.seqlens[index * p.seqlens_stride_row + head * p.seqlens_stride_head] = keys_of(p, row, whole, cut, tail);
}

}  // namespace attnops::block_lists::cpu
