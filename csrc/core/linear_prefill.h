#pragma once
#include "core/linear_step.h"
#include "core/state_report.h"

namespace attnops {

inline constexpr int kChunk = 64;  // tokens; states are kept at multiples of it alone

// Ragged requests through a linear recurrence. The rows of `step` are tokens: their `stride_request` leads from token
// to token. A request's tokens count from its prefix, so that chunks and checkpoints lie where they would without one.
struct LinearPrefill {
  LinearStep step;
  int64_t num_tokens;
  const int32_t* cu_seqlens;        // [batch_size + 1]
  const int32_t* prefix_lens;       // [batch_size]: tokens that the state has seen; 0: it starts at zero
  const int32_t* checkpoint_slots;  // [batch_size, max_checkpoints], or null; below 0: not kept
  int64_t max_checkpoints, stride_checkpoints;
  const int32_t* plan;  // [batch_size]: requests in the order of their work, or null
  void* scratch;        // of the kernels that take whole chunks, or null
  int64_t scratch_bytes;
  bool cut;  // whether a kernel may take parts of a prompt at the same time

  // First token of a request; bounds that fall or leave the tokens hold none.
  ATTNOPS_HOST_DEVICE int64_t first_token(int64_t request) const {
    const int64_t first = cu_seqlens[request];
    return first < 0 ? 0 : first > num_tokens ? num_tokens : first;
  }
  ATTNOPS_HOST_DEVICE int64_t prefix(int64_t request) const {
    return prefix_lens[request] < 0 ? 0 : prefix_lens[request];
  }
  ATTNOPS_HOST_DEVICE bool in_pool(int64_t slot) const { return slot >= 0 && slot < step.num_slots; }

  // How many multiples of kChunk a request reaches, as far as checkpoint_slots has cells for them.
  ATTNOPS_HOST_DEVICE int64_t num_checkpoints(int64_t request) const {
    if (checkpoint_slots == nullptr) return 0;
    const int64_t tokens = first_token(request + 1) - first_token(request), before = prefix(request);
    const int64_t reached = tokens <= 0 ? 0 : (before + tokens) / kChunk - before / kChunk;
    return reached < max_checkpoints ? reached : max_checkpoints;
  }
  // Where the state of a request goes that has seen `seen` tokens; below 0: nowhere.
  ATTNOPS_HOST_DEVICE int64_t checkpoint(int64_t request, int64_t seen) const {
    if (checkpoint_slots == nullptr || seen % kChunk != 0) return -1;
    const int64_t cell = seen / kChunk - prefix(request) / kChunk - 1;
    const int64_t slot =
        cell < 0 || cell >= max_checkpoints ? -1 : checkpoint_slots[request * stride_checkpoints + cell];
    return in_pool(slot) ? slot : -1;
  }

  // Records what a request names out of range, and slots that it writes with another one or twice.
  ATTNOPS_HOST_DEVICE void check(ReportOp op, int64_t request, int32_t* to) const {
    const auto is_planned_before = [&] {
      bool found = false;
      for (int64_t other = 0; other < request; ++other) found = found || plan[other] == plan[request];
      return found;
    };
    check_with(op, request, to, is_planned_before, [&](int64_t slot, int64_t cell) {
      for (int64_t other = 0; other <= request; ++other) {
        const int64_t cells = other == request ? cell : num_checkpoints(other);
        for (int64_t i = -1; i < cells; ++i) {
          if (slot_of(other, i) == slot) record_fault(to, {op, kReportSharedSlot, request, other, slot, 0});
        }
      }
    });
  }

  // The same, where `is_planned_before` says whether an earlier entry of the plan is the same, and `find_shared`
  // records what names the slot of a cell before it does.
  template <typename IsPlannedBefore, typename FindShared>
  ATTNOPS_HOST_DEVICE void check_with(ReportOp op, int64_t request, int32_t* to,
                                      const IsPlannedBefore& is_planned_before, const FindShared& find_shared) const {
    const int64_t begin = cu_seqlens[request], end = cu_seqlens[request + 1];
    if (end < begin || begin < 0 || end > num_tokens) {
      record_fault(to, {op, kReportTokenBounds, request, begin, end, num_tokens});
    }
    if (prefix_lens[request] < 0) record_fault(to, {op, kReportPrefix, request, 0, prefix_lens[request], 0});
    if (plan != nullptr) {
      const bool fits = plan[request] >= 0 && plan[request] < step.batch_size && !is_planned_before();
      if (!fits) record_fault(to, {op, kReportPlan, request, 0, plan[request], step.batch_size});
    }
    const int64_t own = num_checkpoints(request);
    for (int64_t cell = -1; cell < own; ++cell) {
      const int64_t slot = slot_of(request, cell);
      if (slot >= step.num_slots) record_fault(to, {op, kReportStateSlot, request, 0, slot, step.num_slots});
      if (slot >= 0) find_shared(slot, cell);
    }
  }

  // Of a checkpoint; cell -1 is the state itself.
  ATTNOPS_HOST_DEVICE int64_t slot_of(int64_t request, int64_t cell) const {
    return cell < 0 ? step.state_indices[request] : checkpoint_slots[request * stride_checkpoints + cell];
  }
};

// What a plan is made of.
struct RequestOrder {
  int32_t* plan;              // [batch_size]: requests, those of the most tokens first
  const int32_t* cu_seqlens;  // [batch_size + 1]
  int batch_size;

  ATTNOPS_HOST_DEVICE int64_t tokens(int64_t request) const {
    return int64_t{cu_seqlens[request + 1]} - cu_seqlens[request];
  }
};

}  // namespace attnops
