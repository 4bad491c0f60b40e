#pragma once
#include "core/index_report.h"
#include "core/math.h"
#include "core/state_report.h"
#include "sparse_indexer/params.h"

// What kernels over index keys ask and compute alike on the CPU and on the GPU.
namespace attnops::sparse_indexer {

ATTNOPS_HOST_DEVICE inline uint32_t bits_of(float x) {
#if defined(__CUDA_ARCH__)
  return __float_as_uint(x);
#else
  return __builtin_bit_cast(uint32_t, x);
#endif
}

ATTNOPS_HOST_DEVICE inline float float_of(uint32_t bits) {
#if defined(__CUDA_ARCH__)
  return __uint_as_float(bits);
#else
  return __builtin_bit_cast(float, bits);
#endif
}

// The scale of a row from the largest of its values' bits without sign. A NaN makes it NaN, so the row's logits are.
ATTNOPS_HOST_DEVICE inline float scale_of(uint32_t largest, bool ue8m0) {
  const float amax = float_of(max_of(largest, bits_of(1e-4f)));
  const float scale = amax / 448.f;
  const uint32_t bits = bits_of(scale);
  if (!ue8m0 || bits >= 0x7F800000u || (bits & 0x7FFFFFu) == 0) return scale;
  return float_of((bits & 0x7F800000u) + 0x800000u);
}

// What a sum and difference tree over `dim` values is multiplied with.
ATTNOPS_HOST_DEVICE inline float hadamard_factor(int dim) { return dim == 64 ? 0.125f : 0.08838834764831845f; }

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

// The request that row `row` belongs to, by bounds [batch_size + 1], or -1.
ATTNOPS_HOST_DEVICE inline int64_t request_of(const int32_t* bounds, int64_t batch_size, int64_t row) {
  int64_t low = 0, high = batch_size;  // bounds[low] <= row < bounds[high], if they rise
  while (high - low > 1) {
    const int64_t middle = (low + high) / 2;
    (bounds[middle] <= row ? low : high) = middle;
  }
  return batch_size > 0 && bounds[low] <= row && row < bounds[low + 1] ? low : -1;
}

// To be called for every request where there is a report.
ATTNOPS_HOST_DEVICE inline void report_bounds(int32_t* report, ReportOp op, const int32_t* bounds, int64_t request,
                                              int64_t num_rows) {
  const int64_t begin = bounds[request], end = bounds[request + 1];
  if (begin >= 0 && begin <= end && end <= num_rows && (request > 0 || begin == 0)) return;
  record_fault(report, {op, kReportTokenBounds, request, begin, end, num_rows});
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

// What token row `row` sees: nothing where it is of no request.
ATTNOPS_HOST_DEVICE inline void expand_row(const ExpandParams& p, int64_t row) {
  const int64_t request = request_of(p.cu_seqlens_q, p.batch_size, row);
  int64_t length = 0;
  if (request >= 0) {  // the last of a request's tokens sees all of it
    const int64_t later = p.cu_seqlens_q[request + 1] - 1 - row;
    length = max_of<int64_t>(p.cache_seqlens[request] - later, 0) / p.ratio;
  }
  p.seqlens[row] = static_cast<int32_t>(length);
  p.rows[row] = static_cast<int32_t>(max_of<int64_t>(request, 0));
  p.topk_length[row] = static_cast<int32_t>(min_of<int64_t>(length, p.topk));
}

}  // namespace attnops::sparse_indexer
