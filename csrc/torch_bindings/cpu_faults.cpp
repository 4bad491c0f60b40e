#include "torch_bindings/cpu_faults.h"

#include <string>

#include "torch_bindings/check.h"

namespace attnops {
void CpuFaults::check() const {
  if (own_[kReportCount] == 0) return;
  const auto text = [&](ReportSlot slot) { return std::to_string(own_[slot]); };
  const std::string in_range = " must be in [0, " + text(kReportLimit) + ")";
  const std::string request = ", request " + text(kReportRequest), got = ", got " + text(kReportValue);
  switch (static_cast<ReportKind>(own_[kReportKind])) {
    case ReportKind::kRequestSlot:
      fail(op_, "req_pool_indices[" + text(kReportRequest) + "]" + in_range + " (max_requests of req_to_token)" + got);
    case ReportKind::kSlotIndex:
      fail(op_, "req_to_token" + request + ", position " + text(kReportPosition) + in_range + " (token slots)" + got);
    case ReportKind::kLength:
      fail(op_, "cache_seqlens[" + text(kReportRequest) + "] must be below " + text(kReportLimit) +
                    " (the tokens that its page_table row holds)" + got);
    default:
      fail(op_, "page_table" + request + ", page " + text(kReportPosition) + in_range + " (num_pages of " + pages_ +
                    ")" + got);
  }
}

void CpuFaults::check_lengths(ReportOp op, const PageTable& table, const int32_t* cache_seqlens, int batch_size) {
  for (int request = 0; request < batch_size; ++request) {
    const int64_t capacity = table.num_cells(request) * table.page_size, length = cache_seqlens[request];
    if (length <= capacity) continue;
    record_fault(report_, {op, ReportKind::kLength, request, 0, length, capacity + 1});
    check();
  }
}

}  // namespace attnops
