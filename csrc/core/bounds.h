#pragma once
#include <cstdint>

#include "core/state_report.h"

// Rows of ragged requests, by bounds int32 [batch_size + 1].
namespace attnops {

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

}  // namespace attnops
