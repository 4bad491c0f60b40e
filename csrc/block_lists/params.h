#pragma once
#include <cstdint>

#include "core/block_report.h"
#include "core/math.h"
#include "core/page_table.h"

namespace attnops::block_lists {

// Lists of blocks as page tables. A row is what one query token (or one request) of one KV head attends to. Its table
// has a cell for each unit of a listed block: the tokens that a block and a page have in common by size.
//
// The units of a row stand in the order of its list, but for its tail: blocks that are not whole, or that hold new
// tokens, stand last, so that a length says where the keys end and causal rows are aligned with it. A window's units
// are tokens; of the block that it cuts those that it holds stand between the whole blocks and the tail, once.
struct Params {
  int64_t num_rows;  // tokens, or requests
  int num_requests, num_kv_heads;
  const int32_t* block_list;  // [B, H_kv, num_blocks]: block, or below 0 for none
  int64_t list_stride_request, list_stride_head;
  int64_t num_blocks;
  PageTable page_table;
  const int32_t* cache_seqlens;  // [B], the new tokens included
  const int32_t* cu_seqlens_q;   // [B + 1], or null: a request then has `rows_per_request` rows
  int64_t rows_per_request;
  bool causal;          // row i of a request sees its own position at most
  int64_t window_left;  // and no key more than so many positions in front of it; -1: off

  int64_t block_size, unit_size, units_per_block, units_per_page;
  int64_t page_step, unit_step, head_step;  // a cell is page * page_step + unit of it * unit_step + head * head_step

  int32_t* tables;  // [num_rows, H_kv, num_cells]
  int64_t table_stride_row, table_stride_head, num_cells;
  int32_t* seqlens;  // [num_rows, H_kv]
  int64_t seqlens_stride_row, seqlens_stride_head;
  int32_t* report;  // core/report.h, or null
};

struct Row {
  int request;
  int64_t length;              // keys before any list, for this row
  int64_t first_tail, blocks;  // [first_tail, blocks) of its blocks stand last
  bool whole_tail;             // listed or not
  int64_t first_key;           // that the window holds
  int64_t first_block;         // the first that is whole in it
  int64_t cut;                 // the block before the tail of which it holds the last tokens; -1 for none
};

// Of numbers from 0 to 2^31: a division of 64 bits costs a GPU some 100 instructions.
ATTNOPS_HOST_DEVICE inline int64_t quotient(int64_t number, int64_t divisor) {
  return static_cast<uint32_t>(number) / static_cast<uint32_t>(divisor);
}
ATTNOPS_HOST_DEVICE inline int64_t quotient_up(int64_t number, int64_t divisor) {
  return quotient(number + divisor - 1, divisor);
}

ATTNOPS_HOST_DEVICE inline int request_of(const Params& p, int64_t index) {
  return static_cast<int>(quotient(index, p.rows_per_request));
}

ATTNOPS_HOST_DEVICE inline Row row_of(const Params& p, int64_t index) {
  Row row{};
  row.request = request_of(p, index);
  const int64_t cached = max_of(min_of(p.cache_seqlens[row.request], p.page_table.num_tokens(row.request)), 0);
  const int64_t position = cached - p.rows_per_request + (index - row.request * p.rows_per_request);
  row.length = p.causal ? max_of<int64_t>(position + 1, 0) : cached;
  row.blocks = quotient_up(row.length, p.block_size);
  row.first_tail = quotient(row.length, p.block_size);
  row.cut = -1;
  if (p.window_left >= 0) {
    row.first_key = max_of<int64_t>(position - p.window_left, 0);
    row.first_block = quotient_up(row.first_key, p.block_size);
    if (row.first_block * p.block_size != row.first_key && row.first_block <= row.first_tail) {
      row.cut = row.first_block - 1;
    }
  }
  if (p.cu_seqlens_q == nullptr) return row;
  const int64_t added = static_cast<int64_t>(p.cu_seqlens_q[row.request + 1]) - p.cu_seqlens_q[row.request];
  if (added > 0) row.first_tail = quotient(max_of<int64_t>(row.length - added, 0), p.block_size);
  row.whole_tail = added > 0;
  return row;
}

ATTNOPS_HOST_DEVICE inline int64_t units_of(const Params& p, int64_t tokens) {
  return quotient_up(tokens, p.unit_size);
}

// First unit of the tail, and its first key.
ATTNOPS_HOST_DEVICE inline int64_t tail_unit(const Params& p, const Row& row) {
  return max_of(row.first_tail * p.units_per_block, row.first_key);  // in a window units are keys
}
ATTNOPS_HOST_DEVICE inline int64_t tail_begin(const Params& p, const Row& row) {
  return max_of(row.first_tail * p.block_size, row.first_key);
}
// Cells of the tail, when it is in.
ATTNOPS_HOST_DEVICE inline int64_t tail_units(const Params& p, const Row& row) {
  return units_of(p, row.length - tail_begin(p, row));
}
// Cells, which are keys, of the block that the window cuts.
ATTNOPS_HOST_DEVICE inline int64_t cut_units(const Params& p, const Row& row) {
  return row.first_block * p.block_size - row.first_key;
}

// Whether an entry of a list is a whole block that stands before the tail. Sets `in_tail` where it is one of the tail,
// and `in_cut` where it is the one that the window cuts.
ATTNOPS_HOST_DEVICE inline bool stands_before_tail(const Params& p, const Row& row, int64_t head, int64_t position,
                                                   int64_t block, bool& in_tail, bool& in_cut) {
  if (block < 0) return false;
  in_tail |= block >= row.first_tail && block < row.blocks;
  in_cut |= block == row.cut;
  if (block < row.first_tail) return block >= row.first_block;
  if (block < row.blocks || p.report == nullptr) return false;
  const int64_t cached = min_of(p.cache_seqlens[row.request], p.page_table.num_tokens(row.request));
  const int64_t limit = quotient_up(max_of<int64_t>(cached, 0), p.block_size);
  if (block >= limit) {
    record_fault(p.report, {kReportBuildBlockTables, kReportBlockIndex, int64_t{row.request} * p.num_kv_heads + head,
                            position, block, limit});
  }
  return false;
}

// The page of a unit of a request, which is counted over all its tokens: below 2^30.
ATTNOPS_HOST_DEVICE inline int64_t page_of_unit(const Params& p, int64_t unit) {
  return quotient(unit, p.units_per_page);
}

// The cell of a unit, whose page the table says; -1 where that is none of the pool.
ATTNOPS_HOST_DEVICE inline int32_t cell_in(const Params& p, int page, int64_t head, int64_t unit) {
  if (!p.page_table.has_page(page)) return -1;
  const int64_t inside = unit - page_of_unit(p, unit) * p.units_per_page;
  return static_cast<int32_t>(page * p.page_step + inside * p.unit_step + head * p.head_step);
}

// Records a page that is none of the pool.
ATTNOPS_HOST_DEVICE inline void report_page(const Params& p, int page, int request, int64_t unit) {
  if (p.report == nullptr || p.page_table.has_page(page)) return;
  record_fault(p.report, {kReportBuildBlockTables, ReportKind::kPageIndex, request, page_of_unit(p, unit), page,
                          p.page_table.num_pages});
}

ATTNOPS_HOST_DEVICE inline int32_t cell_of(const Params& p, const int32_t* pages, int request, int64_t head,
                                           int64_t unit) {
  const int page = pages[page_of_unit(p, unit)];
  report_page(p, page, request, unit);
  return cell_in(p, page, head, unit);
}

// Blocks before the tail that a table has cells for. A tail that is in whatever the list says comes first.
ATTNOPS_HOST_DEVICE inline int64_t blocks_with_room(const Params& p, const Row& row) {
  return quotient(max_of<int64_t>(p.num_cells - (row.whole_tail ? tail_units(p, row) : 0), 0), p.units_per_block);
}

// Records that a row of `count` whole blocks and a tail of `tail` cells needs more cells than its table has.
ATTNOPS_HOST_DEVICE inline void report_room(const Params& p, const Row& row, int64_t head, int64_t count,
                                            int64_t tail) {
  const int64_t needed = count * p.units_per_block + tail;
  if (p.report == nullptr || needed <= p.num_cells) return;
  record_fault(p.report, {kReportBuildBlockTables, kReportBlockRoom, int64_t{row.request} * p.num_kv_heads + head, 0,
                          needed, p.num_cells + 1});
}

// Keys of a row of `count` whole blocks, which have room, `cut` of the one that the window cuts, and a tail of `tail`
// cells, left out where it has none.
ATTNOPS_HOST_DEVICE inline int32_t keys_of(const Params& p, const Row& row, int64_t count, int64_t cut, int64_t tail) {
  const int64_t keys = count * p.block_size + cut;
  const bool fits = count * p.units_per_block + cut + tail <= p.num_cells;
  return static_cast<int32_t>(tail > 0 && fits ? keys + row.length - tail_begin(p, row) : keys);
}

}  // namespace attnops::block_lists
