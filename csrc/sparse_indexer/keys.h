#pragma once
#include "core/bounds.h"
#include "core/index_key.h"
#include "core/index_report.h"
#include "core/math.h"
#include "sparse_indexer/params.h"

// What kernels over index keys ask and compute alike on the CPU and on the GPU.
namespace attnops::sparse_indexer {

struct KeyPlace {
  int64_t page;
  int offset;
  bool valid;
};

// Where a new key goes; nowhere if its slot is padding or outside the pool.
ATTNOPS_HOST_DEVICE inline KeyPlace place_of(const StoreIndexParams& p, int64_t token) {
  const int64_t slot = p.out_cache_loc[token], num_slots = p.pages.num_pages * p.pages.page_size;
  if (slot < 0) return {0, 0, false};
  if (slot >= num_slots) {
    if (p.report != nullptr) {
      record_fault(p.report, {kReportStoreIndexK, ReportKind::kSlotIndex, token, token, slot, num_slots});
    }
    return {0, 0, false};
  }
  const int64_t page = page_of(slot, p.pages.page_size, p.pages.page_shift);
  return {page, static_cast<int>(slot - page * p.pages.page_size), true};
}

// Where a key of a request is; invalid where the table or the pool has no such page.
ATTNOPS_HOST_DEVICE inline KeyPlace place_of(const GatherIndexParams& p, int64_t request, int64_t position) {
  const int64_t cell = page_of(position, p.pages.page_size, p.pages.page_shift);
  const int offset = static_cast<int>(position - cell * p.pages.page_size);
  if (position < 0 || cell >= p.max_pages) {
    if (p.report != nullptr)
      record_fault(p.report, {kReportGatherIndexK, kReportTableCell, request, position, cell, p.max_pages});
    return {0, 0, false};
  }
  const int64_t page = p.page_table[request * p.stride_table + cell];
  if (page >= 0 && page < p.pages.num_pages) return {page, offset, true};
  if (p.report != nullptr)
    record_fault(p.report, {kReportGatherIndexK, ReportKind::kPageIndex, request, cell, page, p.pages.num_pages});
  return {0, 0, false};
}

// What token row `row` of `request` sees: nothing where that is -1.
ATTNOPS_HOST_DEVICE inline void expand_row(const ExpandParams& p, int64_t row, int64_t request) {
  int64_t length = 0;
  if (request >= 0) {  // the last of a request's tokens sees all of it
    const int64_t later = p.cu_seqlens_q[request + 1] - 1 - row;
    length = max_of<int64_t>(p.cache_seqlens[request] - later, 0) / p.ratio;
  }
  p.seqlens[row] = static_cast<int32_t>(length);
  p.rows[row] = static_cast<int32_t>(max_of<int64_t>(request, 0));
  p.topk_length[row] = static_cast<int32_t>(min_of<int64_t>(length, p.topk));
}

ATTNOPS_HOST_DEVICE inline void expand_row(const ExpandParams& p, int64_t row) {
  expand_row(p, row, attnops::request_of(p.cu_seqlens_q, p.batch_size, row));
}

}  // namespace attnops::sparse_indexer
