#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>

#include "cpu/linear_step.h"
#include "ssd/checks.h"
#include "torch_bindings/cpu_faults.h"
#include "torch_bindings/linear_cpu.h"

namespace attnops::ssd {
namespace {

void ssd_decode_cpu(const Tensor& out, const Tensor& states, const Tensor& x, const OptionalTensor& dt, const Tensor& a,
                    const Tensor& b, const Tensor& c, const OptionalTensor& d, const OptionalTensor& dt_bias,
                    const OptionalTensor& z, const Tensor& state_indices, const OptionalTensor& out_state_indices,
                    double scale, bool dt_softplus, const OptionalTensor& report) {
  const LinearStep p = checked_decode(
      {out, states, x, dt, a, b, c, d, dt_bias, z, state_indices, out_state_indices, scale, dt_softplus, report});
  CpuFaults faults("ssd_decode", "states", p.report);
  attnops::cpu::check_step_slots(p, kReportSsdDecode, faults.report());
  faults.check();
  torch::stable::parallel_for(0, int64_t{p.batch_size} * p.num_heads, 1, [&](int64_t begin, int64_t end) {
    attnops::cpu::linear_step_heads(p, false, begin, end);
  });
}

void ssd_prefill_cpu(const Tensor& out, const Tensor& states, const Tensor& x, const OptionalTensor& dt,
                     const Tensor& a, const Tensor& b, const Tensor& c, const OptionalTensor& d,
                     const OptionalTensor& dt_bias, const OptionalTensor& z, const Tensor& cu_seqlens,
                     const Tensor& prefix_lens, const Tensor& state_indices, const OptionalTensor& checkpoint_slots,
                     const OptionalTensor& plan, const OptionalTensor& scratch, double scale, bool dt_softplus,
                     const OptionalTensor& report, bool cut_prompts) {
  const OptionalTensor elsewhere;
  const LinearPrefill p = checked_prefill(
      {out, states, x, dt, a, b, c, d, dt_bias, z, state_indices, elsewhere, scale, dt_softplus, report},
      {cu_seqlens, prefix_lens, checkpoint_slots, plan, scratch, cut_prompts});
  attnops::cpu::linear_prefill("ssd_prefill", kReportSsdPrefill, p, false);
}

void ssd_plan_cpu(const Tensor& plan, const Tensor& cu_seqlens) {
  attnops::cpu::order_requests(checked_plan("ssd_plan", plan, cu_seqlens));
}

void ssd_verify_cpu(const Tensor& out, const Tensor& ring_u, const Tensor& ring_k, const Tensor& ring_decay,
                    const Tensor& states, const Tensor& ring_len, const Tensor& x, const OptionalTensor& dt,
                    const Tensor& a, const Tensor& b, const Tensor& c, const OptionalTensor& d,
                    const OptionalTensor& dt_bias, const OptionalTensor& z, const Tensor& state_indices,
                    const OptionalTensor& tree_mask, double scale, bool dt_softplus, const OptionalTensor& report) {
  const OptionalTensor elsewhere;
  const LinearVerify p = checked_verify(
      "ssd_verify", {out, states, x, dt, a, b, c, d, dt_bias, z, state_indices, elsewhere, scale, dt_softplus, report},
      {ring_u, ring_k, ring_decay, ring_len}, tree_mask);
  attnops::cpu::linear_verify("ssd_verify", kReportSsdVerify, p, false);
}

void ssd_commit_cpu(const Tensor& states, const Tensor& ring_u, const Tensor& ring_k, const Tensor& ring_decay,
                    const Tensor& ring_len, const Tensor& state_indices, const Tensor& accepted_path,
                    const Tensor& accepted_len, bool fold, const OptionalTensor& report) {
  const LinearCommit p = checked_commit(
      "ssd_commit",
      {states, {ring_u, ring_k, ring_decay, ring_len}, state_indices, accepted_path, accepted_len, fold, report});
  attnops::cpu::linear_commit("ssd_commit", kReportSsdCommit, p);
}

void ssd_draft_step_cpu(const Tensor& out, const Tensor& ring_u, const Tensor& ring_k, const Tensor& ring_decay,
                        const Tensor& states, const Tensor& ring_len, const Tensor& x, const OptionalTensor& dt,
                        const Tensor& a, const Tensor& b, const Tensor& c, const OptionalTensor& d,
                        const OptionalTensor& dt_bias, const OptionalTensor& z, const Tensor& state_indices,
                        const Tensor& accepted_path, const Tensor& accepted_len, const OptionalTensor& tree_mask,
                        double scale, bool dt_softplus, const OptionalTensor& semaphores,
                        const OptionalTensor& report) {
  const OptionalTensor elsewhere;
  const LinearDraftStep p = checked_draft_step(
      {out, states, x, dt, a, b, c, d, dt_bias, z, state_indices, elsewhere, scale, dt_softplus, report},
      {ring_u, ring_k, ring_decay, ring_len}, tree_mask, {accepted_path, accepted_len, semaphores});
  attnops::cpu::linear_draft_step("ssd_draft_step", kReportSsdDraftStep, p, false);
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(attnops, CPU, m) {
  m.impl("ssd_decode", TORCH_BOX(&ssd_decode_cpu));
  m.impl("ssd_prefill", TORCH_BOX(&ssd_prefill_cpu));
  m.impl("ssd_plan", TORCH_BOX(&ssd_plan_cpu));
  m.impl("ssd_verify", TORCH_BOX(&ssd_verify_cpu));
  m.impl("ssd_commit", TORCH_BOX(&ssd_commit_cpu));
  m.impl("ssd_draft_step", TORCH_BOX(&ssd_draft_step_cpu));
}

}  // namespace attnops::ssd
