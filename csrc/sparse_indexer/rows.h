#pragma once
#include "core/index_report.h"
#include "core/math.h"
#include "core/slots.h"
#include "sparse_indexer/params.h"

// What every kernel of topk_select asks about a row and a key, on the CPU and on the GPU. Nothing here reads outside an
// array, whatever the values are.
namespace attnops::sparse_indexer {

struct RowKeys {
  int64_t start;    // column of the first
  int64_t count;    // 0: the row has none
  int64_t request;  // row of the page table
};

// Keys of a row from its first one on, as far as the caller says.
ATTNOPS_HOST_DEVICE inline int64_t length_of(const SelectParams& p, int64_t row) {
  return p.lengths_are_ends ? int64_t{p.lengths[row]} - p.row_starts[row] : p.lengths[row];
}

// Of the page table.
ATTNOPS_HOST_DEVICE inline int64_t request_of(const SelectParams& p, int64_t row) {
  if (p.row_to_request != nullptr) return p.row_to_request[row];
  return p.rows_per_request == 1 ? row : row / p.rows_per_request;
}

// The keys of a row that are served: those within the columns.
ATTNOPS_HOST_DEVICE inline RowKeys keys_of(const SelectParams& p, int64_t row) {
  const int64_t length = length_of(p, row);
  const int64_t start = p.row_starts != nullptr ? p.row_starts[row] : 0;
  const int64_t request = request_of(p, row);
  const bool served = length > 0 && start >= 0 && start < p.columns &&
                      (p.page_table == nullptr || (request >= 0 && request < p.num_requests));
  return {start, served ? min_of(length, p.columns - start) : 0, request};
}

// To be called once per row where there is a report.
ATTNOPS_HOST_DEVICE inline void report_row(const SelectParams& p, int64_t row) {
  const int64_t length = length_of(p, row);
  if (length <= 0) return;
  const int64_t start = p.row_starts != nullptr ? p.row_starts[row] : 0;
  const int64_t request = request_of(p, row), told = p.first_row + row;
  if (start < 0 || start >= p.columns) {
    record_fault(p.report, {p.report_op, kReportRowStart, told, 0, start, p.columns});
  } else if (length > p.columns - start) {
    record_fault(p.report, {p.report_op, kReportRowLength, told, start, length, p.columns - start + 1});
  }
  if (p.page_table != nullptr && (request < 0 || request >= p.num_requests)) {
    record_fault(p.report, {p.report_op, kReportRowRequest, told, 0, request, p.num_requests});
  }
}

// Where a row's key is among those that the page table has cells for.
ATTNOPS_HOST_DEVICE inline int place_of(const SelectParams& p, int64_t row, int position) {
  return p.lengths_are_ends ? position + p.row_starts[row] : position;
}

// Of the page table, that such a key is in.
ATTNOPS_HOST_DEVICE inline int64_t cell_of(const SelectParams& p, int place) {
  return page_of(static_cast<uint32_t>(place), p.page_size, p.page_shift);  // known to have 32 bits
}

// The index of a row's key; -1 where none can be made.
ATTNOPS_HOST_DEVICE inline int32_t find_index(const SelectParams& p, int64_t row, int64_t request, int position) {
  int64_t index = position;
  if (p.page_table != nullptr) {
    const int place = place_of(p, row, position);
    const int64_t cell = cell_of(p, place);
    const int64_t page = cell < p.max_pages ? p.page_table[request * p.stride_table + cell] : -1;
    index = page < 0 ? -1 : page * p.page_size + (place - cell * p.page_size);
  } else if (p.offsets != nullptr) {
    index = int64_t{p.offsets[row]} + position;
  }
  return index >= 0 && index <= INT32_MAX ? static_cast<int32_t>(index) : -1;
}

// Why find_index has found none.
ATTNOPS_HOST_DEVICE inline void record_no_index(const SelectParams& p, int64_t row, int64_t request, int position) {
  constexpr uint32_t kIndices = 1u << 31;
  int64_t value = 0, limit = kIndices;
  ReportKind kind = kReportSlotRange;
  if (p.page_table == nullptr) {
    value = int64_t{p.offsets[row]} + position;
  } else if (const int64_t cell = cell_of(p, place_of(p, row, position)); cell >= p.max_pages) {
    kind = kReportTableCell, value = cell, limit = p.max_pages;
  } else {
    value = p.page_table[request * p.stride_table + cell], limit = kIndices / static_cast<uint32_t>(p.page_size);
  }
  record_fault(p.report, {p.report_op, kind, p.first_row + row, position, value, limit});
}

// The same as find_index, and records where there is none.
ATTNOPS_HOST_DEVICE inline int32_t index_of(const SelectParams& p, int64_t row, int64_t request, int position) {
  const int32_t index = find_index(p, row, request, position);
  if (index < 0 && p.report != nullptr) record_no_index(p, row, request, position);
  return index;
}

}  // namespace attnops::sparse_indexer
