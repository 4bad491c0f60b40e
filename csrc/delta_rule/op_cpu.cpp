#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>

#include "cpu/linear_step.h"
#include "delta_rule/checks.h"
#include "torch_bindings/cpu_faults.h"

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

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(attnops, CPU, m) { m.impl("delta_decode", TORCH_BOX(&delta_decode_cpu)); }

}  // namespace attnops::delta_rule
