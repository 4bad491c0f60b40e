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

inline void check_prompts(ReportOp op, const LinearPrefill& p, int32_t* report) {
  SlotOwners owners, planned;
  for (int64_t request = 0; request < p.step.batch_size; ++request) {
    const int64_t cells = p.num_checkpoints(request);
    for (int64_t cell = -1; cell < cells; ++cell) owners.add(p.slot_of(request, cell), request);
    if (p.plan != nullptr) planned.add(p.plan[request], request);
  }
  owners.sort();
  planned.sort();
  for (int64_t request = 0; request < p.step.batch_size; ++request) {
    p.check_with(
        op, request, report, [&] { return planned.first(p.plan[request]) != request; },
        [&](int64_t slot, int64_t) { owners.check_next(op, slot, request, report); });
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

// Of LinearVerify and LinearCommit.
template <typename Params>
void check_rings(ReportOp op, const Params& p, int64_t requests, int32_t* report) {
  SlotOwners owners = owners_of(p.step.state_indices, requests, p.step.num_slots);
  for (int64_t request = 0; request < requests; ++request) {
    p.check_with(op, request, report, [&](int64_t slot) { owners.check_next(op, slot, request, report); });
  }
}

inline void run_verify(const LinearVerify& p, bool delta) {
  torch::stable::parallel_for(0, int64_t{p.step.batch_size} * p.step.num_heads, 1,
                              [&](int64_t begin, int64_t end) { linear_verify_heads(p, delta, begin, end); });
}

inline void linear_verify(const char* op, ReportOp report_op, const LinearVerify& p, bool delta) {
  CpuFaults faults(op, "states", p.step.report);
  check_rings(report_op, p, p.step.num_heads == 0 ? 0 : p.step.batch_size, faults.report());
  faults.check();
  run_verify(p, delta);
}

inline void run_commit(const LinearCommit& p) {
  torch::stable::parallel_for(0, int64_t{p.step.batch_size} * p.step.num_heads, 1,
                              [&](int64_t begin, int64_t end) { linear_commit_heads(p, begin, end); });
  for (int64_t request = 0; request < p.step.batch_size; ++request) p.move_cursor(request);
}

inline void linear_commit(const char* op, ReportOp report_op, const LinearCommit& p) {
  CpuFaults faults(op, "states", p.step.report);
  check_rings(report_op, p, p.step.batch_size, faults.report());
  faults.check();
  run_commit(p);
}

// What a commit may find wrong is all that its verification would.
inline void linear_draft_step(const char* op, ReportOp report_op, const LinearDraftStep& p, bool delta) {
  if (p.verify.step.num_heads == 0) return;
  const LinearCommit commit = p.commit();
  CpuFaults faults(op, "states", p.verify.step.report);
  check_rings(report_op, commit, commit.step.batch_size, faults.report());
  faults.check();
  run_commit(commit);
  run_verify(p.verify, delta);
}

}  // namespace attnops::cpu
