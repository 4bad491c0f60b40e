#pragma once
#include <torch/csrc/stable/ops.h>

#include <algorithm>
#include <numeric>

#include "cpu/linear_step.h"
#include "cpu/slot_owners.h"
#include "torch_bindings/cpu_faults.h"
#include "torch_bindings/linear_checks.h"

// The prefill, verify and commit ops of linear recurrences on the CPU.
namespace attnops::cpu {

// What LinearPrefill::check records, without a walk over all requests for each of them.
inline void check_prompts(ReportOp op, const LinearPrefill& p, int32_t* report) {
  const int64_t batch_size = p.step.batch_size;
  const auto each_slot = [&](int64_t request, auto&& take) {  // its state, then its checkpoints
    take(int64_t{p.step.state_indices[request]});
    const int64_t cells = p.num_checkpoints(request);
    for (int64_t cell = 0; cell < cells; ++cell) {
      take(int64_t{p.checkpoint_slots[request * p.stride_checkpoints + cell]});
    }
  };
  SlotOwners owners, planned;
  for (int64_t request = 0; request < batch_size; ++request) {
    each_slot(request, [&](int64_t slot) { owners.add(slot, request); });
    if (p.plan != nullptr) planned.add(p.plan[request], request);
  }
  owners.sort();
  planned.sort();
  for (int64_t request = 0; request < batch_size; ++request) {
    const int64_t begin = p.cu_seqlens[request], end = p.cu_seqlens[request + 1];
    if (end < begin || begin < 0 || end > p.num_tokens) {
      record_fault(report, {op, kReportTokenBounds, request, begin, end, p.num_tokens});
    }
    const int64_t prefix = p.prefix_lens[request];
    if (prefix < 0) record_fault(report, {op, kReportPrefix, request, 0, prefix, 0});
    if (p.plan != nullptr) {
      const int64_t own = p.plan[request];
      const bool fits = own >= 0 && own < batch_size && planned.first(own) == request;
      if (!fits) record_fault(report, {op, kReportPlan, request, 0, own, batch_size});
    }
    each_slot(request, [&](int64_t slot) {
      if (slot >= p.step.num_slots) record_fault(report, {op, kReportStateSlot, request, 0, slot, p.step.num_slots});
      owners.check_next(op, slot, request, report);
    });
  }
}

inline void linear_prefill(const char* op, ReportOp report_op, const LinearPrefill& p, bool delta) {
  CpuFaults faults(op, "states", p.step.report);
  check_prompts(report_op, p, faults.report());
  faults.check();
  torch::stable::parallel_for(0, (int64_t{p.step.batch_size} + 1) * p.step.num_heads, 1,
                              [&](int64_t begin, int64_t end) { linear_prefill_heads(p, delta, begin, end); });
}

// Requests with the most tokens first; among equals the first one.
inline void order_requests(const RequestOrder& p) {
  std::iota(p.plan, p.plan + p.batch_size, 0);
  std::stable_sort(p.plan, p.plan + p.batch_size, [&](int a, int b) { return p.tokens(a) > p.tokens(b); });
}

// What LinearVerify::check records of the first requests, without a walk over all of them for each. `then` goes on with
// each that is not padding.
template <typename Then>
void check_rings(ReportOp op, const LinearStep& p, const StateRings& rings, int drafts, int64_t requests,
                 int32_t* report, Then&& then) {
  SlotOwners owners = owners_of(p.state_indices, requests);
  for (int64_t request = 0; request < requests; ++request) {
    const int64_t slot = p.state_indices[request];
    if (slot < 0) continue;
    if (slot >= p.num_slots) record_fault(report, {op, kReportStateSlot, request, 0, slot, p.num_slots});
    owners.check_next(op, slot, request, report);
    if (slot < p.num_slots) {
      const int64_t most = rings.rows - drafts, length = rings.lengths[slot];
      if (length < 0 || length > most) record_fault(report, {op, kReportRingLength, request, 0, length, most + 1});
    }
    then(request);
  }
}

inline void linear_verify(const char* op, ReportOp report_op, const LinearVerify& p, bool delta) {
  CpuFaults faults(op, "states", p.step.report);
  const int64_t batch_size = p.step.num_heads == 0 ? 0 : p.step.batch_size;
  check_rings(report_op, p.step, p.rings, p.drafts, batch_size, faults.report(), [](int64_t) {});
  faults.check();
  torch::stable::parallel_for(0, batch_size * p.step.num_heads, 1,
                              [&](int64_t begin, int64_t end) { linear_verify_heads(p, delta, begin, end); });
}

inline void linear_commit(const char* op, ReportOp report_op, const LinearCommit& p) {
  CpuFaults faults(op, "states", p.step.report);
  int32_t* report = faults.report();
  check_rings(report_op, p.step, p.rings, p.drafts, p.step.batch_size, report, [&](int64_t request) {
    const int64_t accepted = p.accepted[request];
    if (accepted < 0 || accepted > p.drafts) {
      return record_fault(report, {report_op, kReportAccepted, request, 0, accepted, p.drafts + 1});
    }
    for (int64_t i = 0, before = -1; i < accepted; ++i) {
      const int64_t draft = p.path[request * p.drafts + i];
      if (draft <= before || draft >= p.drafts) {
        record_fault(report, {report_op, kReportPath, request, i, draft, p.drafts});
      }
      before = draft;
    }
  });
  faults.check();
  torch::stable::parallel_for(0, int64_t{p.step.batch_size} * p.step.num_heads, 1,
                              [&](int64_t begin, int64_t end) { linear_commit_heads(p, begin, end); });
  for (int64_t request = 0; request < p.step.batch_size; ++request) p.move_cursor(request);
}

}  // namespace attnops::cpu
