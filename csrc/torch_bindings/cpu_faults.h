#pragma once
#include <cstdint>

#include "core/page_table.h"
#include "core/report.h"

namespace attnops {

// Where a CPU kernel records what it met out of range, and skipped. The caller's report, if there is one: the rest is
// then the caller's affair. Else one of its own, and the op fails with the first fault.
class CpuFaults {
 public:
  // `pages` is the argument's name, for messages: of the pages, or of the slots where they are not req_to_token's.
  CpuFaults(const char* op, const char* pages, int32_t* report)
      : op_(op), pages_(pages), report_(report != nullptr ? report : own_) {}
  CpuFaults(const CpuFaults&) = delete;
  CpuFaults& operator=(const CpuFaults&) = delete;

  int32_t* report() { return report_; }

  // Fails if something was met that no caller asked to be told of.
  void check() const;

  // Records lengths that no table holds, or for which the pool has no page at all; or fails at the first.
  void check_lengths(ReportOp op, const PageTable& table, const int32_t* cache_seqlens, int batch_size);

 private:
  const char* op_;
  const char* pages_;
  int32_t own_[kReportSize] = {};
  int32_t* report_;
};

}  // namespace attnops
