#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>

#include "cpu/linear_step.h"
#include "delta_rule/checks.h"
#include "torch_bindings/cpu_faults.h"
#include "torch_bindings/linear_prefill_cpu.h"

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
                       const OptionalTensor& checkpoint_slots, const OptionalTensor& plan, double scale,
                       double lower_bound, bool qk_l2norm, const OptionalTensor& report) {
  const OptionalTensor elsewhere;
  const LinearPrefill p = checked_prefill(
      {out, states, q, k, v, a, b, a_log, dt_bias, state_indices, elsewhere, scale, lower_bound, qk_l2norm, report},
      {cu_seqlens, prefix_lens, checkpoint_slots, plan});
  attnops::cpu::linear_prefill("delta_prefill", kReportDeltaPrefill, p, true);
}

void delta_plan_cpu(const Tensor& plan, const Tensor& cu_seqlens) {
  attnops::cpu::order_requests(checked_plan("delta_plan", plan, cu_seqlens));
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(attnops, CPU, m) {
  m.impl("delta_decode", TORCH_BOX(&delta_decode_cpu));
  m.impl("delta_prefill", TORCH_BOX(&delta_prefill_cpu));
  m.impl("delta_plan", TORCH_BOX(&delta_plan_cpu));
}

}  // namespace attnops::delta_rule
