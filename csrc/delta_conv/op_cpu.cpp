#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>

#include <vector>

#include "causal_conv1d/cpu/launch.h"
#include "cpu/linear_step.h"
#include "delta_conv/checks.h"
#include "torch_bindings/cpu_faults.h"

namespace attnops::delta_conv {
namespace {

// A group of key heads of a request at a time: its channels go through the convolution into a row of the thread's own,
// rounded as `causal_conv1d_update` rounds them, and from there through the recurrence.
template <typename T>
void run_groups(ConvDecode p, int64_t begin, int64_t end) {
  const int per_group = p.step.heads_per_group, groups = p.step.num_heads / per_group;
  const int64_t keys = p.step.key_dim, values = int64_t{per_group} * p.step.value_dim;
  std::vector<T> row(static_cast<size_t>(p.conv.channels));
  p.put_rows(row.data(), 0);
  for (int64_t i = begin; i < end; ++i) {
    const int64_t request = i / groups, group = i % groups;
    const auto convolve = [&](int64_t first, int64_t count) {
      causal_conv1d::cpu::run_channels(p.conv, request, first, first + count);
    };
    convolve(group * keys, keys);
    convolve((groups + group) * keys, keys);
    convolve(2 * groups * keys + group * values, values);
    const int64_t head = request * p.step.num_heads + group * per_group;
    attnops::cpu::linear_step_heads(p.step, true, head, head + per_group);
  }
}

void delta_conv_decode_cpu(const Tensor& out, const Tensor& states, const Tensor& conv_states, const Tensor& x,
                           const Tensor& weight, const OptionalTensor& bias, const Tensor& a, const Tensor& b,
                           const OptionalTensor& a_log, const OptionalTensor& dt_bias, const Tensor& state_indices,
                           int64_t num_k_heads, bool silu, double scale, double lower_bound, bool qk_l2norm,
                           const OptionalTensor& /*mixed*/, const OptionalTensor& report) {
  const OptionalTensor elsewhere;
  const ConvDecode p = checked_conv_decode(
      out, {out, conv_states, x, weight, bias, state_indices, silu, report},
      {x, states, a, b, "x", a_log, dt_bias, state_indices, elsewhere, scale, lower_bound, qk_l2norm, report},
      num_k_heads);
  CpuFaults faults("delta_conv_decode", "states", p.step.report);
  attnops::cpu::check_step_slots(p.step, kReportDeltaConvDecode, faults.report());
  faults.check();
  const int64_t groups = p.step.num_heads / p.step.heads_per_group;
  torch::stable::parallel_for(0, p.step.batch_size * groups, 1, [&](int64_t begin, int64_t end) {
    p.step.dtype == DType::kFloat32 ? run_groups<float>(p, begin, end) : run_groups<uint16_t>(p, begin, end);
  });
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(attnops, CPU, m) { m.impl("delta_conv_decode", TORCH_BOX(&delta_conv_decode_cpu)); }

}  // namespace attnops::delta_conv
