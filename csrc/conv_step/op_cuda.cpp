#include <torch/csrc/stable/library.h>

#include "causal_conv1d/cuda/launch.h"
#include "conv_step/checks.h"
#include "conv_step/sm90/step.h"
#include "delta_rule/cuda/launch.h"
#include "ssd/cuda/launch.h"
#include "torch_bindings/stream.h"

namespace attnops::conv_step {
namespace {

// Elements of a call's states up to which one launch is faster than two: docs/log/linear.md has the cells. What the
// host knows decides, no length.
constexpr int64_t kMostInOneLaunch = int64_t{1} << 17;

bool takes_one_launch(const LinearStep& p) {
  return int64_t{p.batch_size} * p.num_heads * p.value_dim * p.key_dim <= kMostInOneLaunch;
}

// Two launches, between which `mixed` [B, C] holds what is convolved. The second one asks for states and gates before
// the first one has ended.
void launch_both(const char* op, ConvDecode p, const Tensor& x, const OptionalTensor& mixed,
                 void (*launch_step)(const LinearStep&, CUstream_st*)) {
  if (!mixed) fail(op, "mixed must be given on CUDA, got None");
  check_mixed(op, p, x, mixed);
  const OnDevice guard(x);
#if defined(ATTNOPS_HAS_SM90)
  if (p.delta && takes_one_launch(p.step) && sm90::launch(p.conv, p.step, current_stream(x))) return;
#endif
  void* rows = mixed->mutable_data_ptr();
  p.step.dtype == DType::kFloat32 ? p.put_rows(static_cast<float*>(rows), p.conv.channels)
                                  : p.put_rows(static_cast<uint16_t*>(rows), p.conv.channels);
  p.step.behind_convolution = true;
  causal_conv1d::launch(p.conv, current_stream(x));
  launch_step(p.step, current_stream(x));
}

void delta_conv_decode_cuda(const Tensor& out, const Tensor& states, const Tensor& conv_states, const Tensor& x,
                            const Tensor& weight, const OptionalTensor& bias, const Tensor& a, const Tensor& b,
                            const OptionalTensor& a_log, const OptionalTensor& dt_bias, const Tensor& state_indices,
                            int64_t num_k_heads, bool silu, double scale, double lower_bound, bool qk_l2norm,
                            const OptionalTensor& mixed, const OptionalTensor& report) {
  const OptionalTensor elsewhere;
  const ConvDecode p = checked_delta(
      out, {out, conv_states, x, weight, bias, state_indices, silu, report},
      {x, states, a, b, "x", a_log, dt_bias, state_indices, elsewhere, scale, lower_bound, qk_l2norm, report},
      num_k_heads);
  launch_both("delta_conv_decode", p, x, mixed, &delta_rule::launch);
}

void ssd_conv_decode_cuda(const Tensor& out, const Tensor& states, const Tensor& conv_states, const Tensor& x,
                          const Tensor& weight, const OptionalTensor& bias, const OptionalTensor& dt, const Tensor& a,
                          const OptionalTensor& d, const OptionalTensor& dt_bias, const OptionalTensor& z,
                          const Tensor& state_indices, int64_t num_groups, bool silu, double scale, bool dt_softplus,
                          const OptionalTensor& mixed, const OptionalTensor& report) {
  const OptionalTensor elsewhere;
  const ConvDecode p =
      checked_ssd(out, {out, conv_states, x, weight, bias, state_indices, silu, report},
                  {x, states, dt, a, d, dt_bias, z, state_indices, elsewhere, scale, dt_softplus, report}, num_groups);
  launch_both("ssd_conv_decode", p, x, mixed, &ssd::launch);
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(attnops, CUDA, m) {
  m.impl("delta_conv_decode", TORCH_BOX(&delta_conv_decode_cuda));
  m.impl("ssd_conv_decode", TORCH_BOX(&ssd_conv_decode_cuda));
}

}  // namespace attnops::conv_step
