#pragma once
#include <cstdint>

#include "core/types.h"

namespace attnops {

// The checked mode's report buffer: int32 [kReportSize], zeroed by the caller, written by kernels that meet an index
// out of range, read by the caller when it pleases. Slot 0 counts the faults; the first fault fills the rest.
enum ReportSlot : int {
  kReportCount = 0,     // faults met, all kinds
  kReportOp = 1,        // ReportOp of the first fault
  kReportKind = 2,      // ReportKind of the first fault
  kReportRequest = 3,   // request, or token where an op has no requests
  kReportPosition = 4,  // cell of the table, or position in the array
  kReportValue = 5,     // what was found there, clamped to int32
  kReportLimit = 6,     // first value that is too large; of kSlotOrder the only right one
  kReportSize = 8,
};

enum class ReportOp : int32_t {
  kNone = 0,
  kBuildPageTable = 1,
  kBuildKvIndices = 2,
  kStoreKv = 3,
  kStoreMlaKv = 4,
  kTranslateSlots = 5,
  kXqaDecode = 6,
  kMlaDecode = 7,
  kFmhaPaged = 8,
  kFmhaVarlen = 9,
  kTorchNative = 10,  // the backend: python/attnops/backends/torch_native.py
};

enum class ReportKind : int32_t {
  kNone = 0,
  kPageIndex = 1,    // a page index outside the pool
  kSlotIndex = 2,    // a token slot outside the pool
  kRequestSlot = 3,  // a request slot outside req_to_token
  kLength = 4,       // a length beyond the table or the limit
  kSlotOrder = 5,    // a token slot that does not follow the others of its page
};

struct Fault {
  ReportOp op;
  ReportKind kind;
  int64_t request, position, value, limit;
};

ATTNOPS_HOST_DEVICE inline int32_t clamp_to_int32(int64_t value) {
  return static_cast<int32_t>(value > INT32_MAX ? INT32_MAX : value < INT32_MIN ? INT32_MIN : value);
}

// Null means that the mode is off: a kernel tests the pointer before it validates anything.
ATTNOPS_HOST_DEVICE inline void record_fault(int32_t* report, const Fault& fault) {
#if defined(__CUDA_ARCH__)
  const int32_t earlier = atomicAdd(report + kReportCount, 1);
#else
  const int32_t earlier = __atomic_fetch_add(report + kReportCount, 1, __ATOMIC_RELAXED);
#endif
  if (earlier != 0) return;
  report[kReportOp] = static_cast<int32_t>(fault.op);
  report[kReportKind] = static_cast<int32_t>(fault.kind);
  report[kReportRequest] = clamp_to_int32(fault.request);
  report[kReportPosition] = clamp_to_int32(fault.position);
  report[kReportValue] = clamp_to_int32(fault.value);
  report[kReportLimit] = clamp_to_int32(fault.limit);
}

}  // namespace attnops
