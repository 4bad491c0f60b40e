#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>

#include <vector>

#include "causal_conv1d/cpu/launch.h"
#include "conv_step/checks.h"
#include "core/math.h"
#include "cpu/linear_step.h"
#include "torch_bindings/cpu_faults.h"

namespace attnops::conv_step {
namespace {

// A group of key heads of a request at a time: its channels go through the convolution into a row of the thread's own,
// rounded as `causal_conv1d_update` rounds them, and from there through the recurrence.
template <typename T>
void run_groups(ConvDecode p, int64_t begin, int64_t end) {
  const int per_group = p.step.heads_per_group, groups = p.groups();
  const int64_t keys = p.step.key_dim, values = int64_t{per_group} * p.step.value_dim;
  std::vector<T> row(static_cast<size_t>(p.conv.channels));
  p.put_rows(row.data(), 0);
  for (int64_t i = begin; i < end; ++i) {
    const int64_t request = i / groups, group = i % groups;
    const auto convolve = [&](int64_t first, int64_t count) {
      causal_conv1d::cpu::run_channels(p.conv, request, first, first + count);
    };
    convolve(p.query_channel() + group * keys, keys);
    convolve(p.key_channel() + group * keys, keys);
    convolve(p.value_channel() + group * values, values);
    const int64_t head = request * p.step.num_heads + group * per_group;
    attnops::cpu::linear_step_heads(p.step, p.delta, head, head + per_group);
  }
}

// Where groups are fewer than threads: all channels first, then all heads.
template <typename T>
void run_apart(ConvDecode p) {
  constexpr int64_t kBlock = causal_conv1d::cpu::kBlock;
  const int64_t blocks = ceil_div(p.conv.channels, kBlock);
  std::vector<T> rows(static_cast<size_t>(p.conv.channels * p.step.batch_size));
  p.put_rows(rows.data(), p.conv.channels);
  torch::stable::parallel_for(0, p.step.batch_size * blocks, 1, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      const int64_t first = i % blocks * kBlock;
      causal_conv1d::cpu::run_channels(p.conv, i / blocks, first, min_of(first + kBlock, p.conv.channels));
    }
  });
  torch::stable::parallel_for(0, int64_t{p.step.batch_size} * p.step.num_heads, 1, [&](int64_t begin, int64_t end) {
    attnops::cpu::linear_step_heads(p.step, p.delta, begin, end);
  });
}

template <typename T>
void run_of(const ConvDecode& p) {
  const int64_t works = int64_t{p.step.batch_size} * p.groups();
  if (works < torch::stable::get_num_threads()) return run_apart<T>(p);
  torch::stable::parallel_for(0, works, 1, [&](int64_t begin, int64_t end) { run_groups<T>(p, begin, end); });
}

// `mixed` is not needed, and is left alone.
void run(const char* op, const ConvDecode& p, const Tensor& x, const OptionalTensor& mixed) {
  check_mixed(op, p, x, mixed);
  CpuFaults faults(op, "states", p.step.report);
  attnops::cpu::check_step_slots(p.step, p.conv.op, faults.report());
  faults.check();
  p.step.dtype == DType::kFloat32 ? run_of<float>(p) : run_of<uint16_t>(p);
}

void delta_conv_decode_cpu(const Tensor& out, const Tensor& states, const Tensor& conv_states, const Tensor& x,
                           const Tensor& weight, const OptionalTensor& bias, const Tensor& a, const Tensor& b,
                           const OptionalTensor& a_log, const OptionalTensor& dt_bias, const Tensor& state_indices,
                           int64_t num_k_heads, bool silu, double scale, double lower_bound, bool qk_l2norm,
                           const OptionalTensor& mixed, const OptionalTensor& report) {
  const OptionalTensor elsewhere;
  run("delta_conv_decode",
      checked_delta(
          out, {out, conv_states, x, weight, bias, state_indices, silu, report},
          {x, states, a, b, "x", a_log, dt_bias, state_indices, elsewhere, scale, lower_bound, qk_l2norm, report},
          num_k_heads),
      x, mixed);
}

void ssd_conv_decode_cpu(const Tensor& out, const Tensor& states, const Tensor& conv_states, const Tensor& x,
                         const Tensor& weight, const OptionalTensor& bias, const OptionalTensor& dt, const Tensor& a,
                         const OptionalTensor& d, const OptionalTensor& dt_bias, const OptionalTensor& z,
                         const Tensor& state_indices, int64_t num_groups, bool silu, double scale, bool dt_softplus,
                         const OptionalTensor& mixed, const OptionalTensor& report) {
  const OptionalTensor elsewhere;
  run("ssd_conv_decode",
      checked_ssd(out, {out, conv_states, x, weight, bias, state_indices, silu, report},
                  {x, states, dt, a, d, dt_bias, z, state_indices, elsewhere, scale, dt_softplus, report}, num_groups),
      x, mixed);
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(attnops, CPU, m) {
  m.impl("delta_conv_decode", TORCH_BOX(&delta_conv_decode_cpu));
  m.impl("ssd_conv_decode", TORCH_BOX(&ssd_conv_decode_cpu));
}

}  // namespace attnops::conv_step
