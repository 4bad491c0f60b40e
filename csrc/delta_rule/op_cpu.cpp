#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>

#include "cpu/linear_step.h"
#include "delta_rule/checks.h"
#include "torch_bindings/cpu_faults.h"
#include "torch_bindings/linear_cpu.h"

namespace attnops::delta_rule {
namespace {

void delta_decode_cpu(const Tensor& out, const Tensor& states, const Tensor& q, const Tensor& k, const Tensor& v,
                      const Tensor& a, const Tensor& b, const OptionalTensor& a_log, const OptionalTensor& dt_bias,
                      const Tensor& state_indices, const OptionalTensor& out_state_indices, double scale,
                      double lower_bound, bool qk_l2norm, const OptionalTensor& report) {
  const LinearStep p = checked_decode({out, states, q, k, v, a, b, a_log, dt_bias, state_indices, out_state_indices,
                                       scale, lower_bound, qk_l2norm, report});
  CpuFaults faults("delta_decode", "states", p.report);
  attnops::cpu::check_step_slots(p, kReportDeltaDecode, faults.report());
  faults.check();
  torch::stable::parallel_for(0, int64_t{p.batch_size} * p.num_heads, 1, [&](int64_t begin, int64_t end) {
    attnops::cpu::linear_step_heads(p, true, begin, end);
  });
}

void delta_prefill_cpu(const Tensor& out, const Tensor& states, const Tensor& q, const Tensor& k, const Tensor& v,
                       const Tensor& a, const Tensor& b, const OptionalTensor& a_log, const OptionalTensor& dt_bias,
                       const Tensor& cu_seqlens, const Tensor& prefix_lens, const Tensor& state_indices,
                       const OptionalTensor& checkpoint_slots, const OptionalTensor& plan,
                       const OptionalTensor& scratch, double scale, double lower_bound, bool qk_l2norm,
                       const OptionalTensor& report, bool cut_prompts) {
  const OptionalTensor elsewhere;
  const LinearPrefill p = checked_prefill(
      {out, states, q, k, v, a, b, a_log, dt_bias, state_indices, elsewhere, scale, lower_bound, qk_l2norm, report},
      {cu_seqlens, prefix_lens, checkpoint_slots, plan, scratch, cut_prompts});
  attnops::cpu::linear_prefill("delta_prefill", kReportDeltaPrefill, p, true);
}

void delta_plan_cpu(const Tensor& plan, const Tensor& cu_seqlens) {
  attnops::cpu::order_requests(checked_plan("delta_plan", plan, cu_seqlens));
}

void delta_verify_cpu(const Tensor& out, const Tensor& ring_u, const Tensor& ring_k, const Tensor& ring_decay,
                      const Tensor& states, const Tensor& ring_len, const Tensor& q, const Tensor& k, const Tensor& v,
                      const Tensor& a, const Tensor& b, const OptionalTensor& a_log, const OptionalTensor& dt_bias,
                      const Tensor& state_indices, const OptionalTensor& tree_mask, double scale, double lower_bound,
                      bool qk_l2norm, const OptionalTensor& report) {
  const OptionalTensor elsewhere;
  const LinearVerify p = checked_verify(
      "delta_verify",
      {out, states, q, k, v, a, b, a_log, dt_bias, state_indices, elsewhere, scale, lower_bound, qk_l2norm, report},
      {ring_u, ring_k, ring_decay, ring_len}, tree_mask);
  attnops::cpu::linear_verify("delta_verify", kReportDeltaVerify, p, true);
}

void delta_commit_cpu(const Tensor& states, const Tensor& ring_u, const Tensor& ring_k, const Tensor& ring_decay,
                      const Tensor& ring_len, const Tensor& state_indices, const Tensor& accepted_path,
                      const Tensor& accepted_len, bool fold, const OptionalTensor& report) {
  const LinearCommit p = checked_commit(
      "delta_commit",
      {states, {ring_u, ring_k, ring_decay, ring_len}, state_indices, accepted_path, accepted_len, fold, report});
  attnops::cpu::linear_commit("delta_commit", kReportDeltaCommit, p);
}

void delta_draft_step_cpu(const Tensor& out, const Tensor& ring_u, const Tensor& ring_k, const Tensor& ring_decay,
                          const Tensor& states, const Tensor& ring_len, const Tensor& q, const Tensor& k,
                          const Tensor& v, const Tensor& a, const Tensor& b, const OptionalTensor& a_log,
                          const OptionalTensor& dt_bias, const Tensor& state_indices, const Tensor& accepted_path,
                          const Tensor& accepted_len, const OptionalTensor& tree_mask, double scale, double lower_bound,
                          bool qk_l2norm, const OptionalTensor& semaphores, const OptionalTensor& report) {
  const OptionalTensor elsewhere;
  const LinearDraftStep p = checked_draft_step(
      {out, states, q, k, v, a, b, a_log, dt_bias, state_indices, elsewhere, scale, lower_bound, qk_l2norm, report},
      {ring_u, ring_k, ring_decay, ring_len}, tree_mask, {accepted_path, accepted_len, semaphores});
  attnops::cpu::linear_draft_step("delta_draft_step", kReportDeltaDraftStep, p, true);
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(attnops, CPU, m) {
  m.impl("delta_decode", TORCH_BOX(&delta_decode_cpu));
  m.impl("delta_prefill", TORCH_BOX(&delta_prefill_cpu));
  m.impl("delta_plan", TORCH_BOX(&delta_plan_cpu));
  m.impl("delta_verify", TORCH_BOX(&delta_verify_cpu));
  m.impl("delta_commit", TORCH_BOX(&delta_commit_cpu));
  m.impl("delta_draft_step", TORCH_BOX(&delta_draft_step_cpu));
}

}  // namespace attnops::delta_rule
