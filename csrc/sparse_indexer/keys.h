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

// The request that a row of ragged keys belongs to, or -1.
ATTNOPS_HOST_DEVICE inline int64_t request_of(const GatherIndexParams& p, int64_t key) {
  int64_t low = 0, high = p.batch_size;  // cu_seqlens[low] <= key < cu_seqlens[high], if they rise
  while (high - low > 1) {
    const int64_t middle = (low + high) / 2;
    (p.cu_seqlens[middle] <= key ? low : high) = middle;
  }
  return p.batch_size > 0 && p.cu_seqlens[low] <= key && key < p.cu_seqlens[low + 1] ? low : -1;
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

// To be called for every request where there is a report.
ATTNOPS_HOST_DEVICE inline void report_bounds(const GatherIndexParams& p, int64_t request) {
  const int64_t begin = p.cu_seqlens[request], end = p.cu_seqlens[request + 1];
  if (begin >= 0 && begin <= end && end <= p.num_keys && (request > 0 || begin == 0)) return;
  record_fault(p.report, {kReportGatherIndexK, kReportTokenBounds, request, begin, end, p.num_keys});
}

}  // namespace attnops::sparse_indexer
