#pragma once
#include "core/index_report.h"
#include "core/math.h"
#include "core/page_table.h"
#include "sparse_indexer/params.h"

// What kernels of index_logits and index_logits_paged ask about rows and keys, on the CPU and on the GPU.
namespace attnops::sparse_indexer {

struct KeyRange {
  int64_t begin, end;    // keys; none where end <= begin
  int64_t first_column;  // of key `begin`
};

// The keys that a row sees and that its columns hold.
ATTNOPS_HOST_DEVICE inline KeyRange keys_of(const LogitsParams& p, int64_t row) {
  if (!p.ragged) {
    const int64_t capacity = min_of(p.max_pages * p.pages.page_size, p.columns);
    return {0, min_of<int64_t>(p.cache_seqlens[row], capacity), 0};
  }
  const int64_t begin = max_of(p.row_starts[row], 0), end = min_of<int64_t>(p.row_ends[row], p.num_keys);
  const int64_t first = p.compressed ? 0 : begin;
  return {begin, min_of(end, begin + p.columns - first), first};
}

// To be called once per row where there is a report.
ATTNOPS_HOST_DEVICE inline void report_row(const LogitsParams& p, int64_t row) {
  if (!p.ragged) {
    const int64_t length = p.cache_seqlens[row], capacity = p.max_pages * p.pages.page_size;
    if (length > capacity) {
      record_fault(p.report, {p.report_op, ReportKind::kLength, p.first_row + row, 0, length, capacity + 1});
    } else if (length > p.columns) {
      record_fault(p.report, {p.report_op, kReportRowLength, p.first_row + row, 0, length, p.columns + 1});
    }
    return;
  }
  const int64_t begin = p.row_starts[row], end = p.row_ends[row];
  if (end <= begin) return;
  const int64_t last = p.compressed ? min_of(p.num_keys, begin + p.columns) : min_of(p.num_keys, p.columns);
  if (begin < 0 || end > last) record_fault(p.report, {kReportIndexLogits, kReportKeyRange, row, begin, end, last});
}

// Page of a request's key, or -1 where the pool has none.
ATTNOPS_HOST_DEVICE inline int64_t page_of_key(const LogitsParams& p, int64_t request, int64_t cell, bool reports) {
  const int64_t page = p.page_table[request * p.stride_table + cell];
  if (page >= 0 && page < p.pages.num_pages) return page;
  if (reports && p.report != nullptr) {
    record_fault(p.report,
                 {p.report_op, ReportKind::kPageIndex, p.first_request + request, cell, page, p.pages.num_pages});
  }
  return -1;
}

}  // namespace attnops::sparse_indexer
