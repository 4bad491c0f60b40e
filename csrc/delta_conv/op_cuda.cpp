#include <torch/csrc/stable/library.h>

#include "causal_conv1d/cuda/launch.h"
#include "delta_conv/checks.h"
#include "delta_conv/sm90/step.h"
#include "delta_rule/cuda/launch.h"
#include "torch_bindings/stream.h"

namespace attnops::delta_conv {
namespace {

// One launch where a kernel has both. Else two: `mixed` [B, C] holds what is convolved.
void delta_conv_decode_cuda(const Tensor& out, const Tensor& states, const Tensor& conv_states, const Tensor& x,
                            const Tensor& weight, const OptionalTensor& bias, const Tensor& a, const Tensor& b,
                            const OptionalTensor& a_log, const OptionalTensor& dt_bias, const Tensor& state_indices,
                            int64_t num_k_heads, bool silu, double scale, double lower_bound, bool qk_l2norm,
                            const OptionalTensor& mixed, const OptionalTensor& report) {
  const char* op = "delta_conv_decode";
  const OptionalTensor elsewhere;
  ConvDecode p = checked_conv_decode(
      out, {out, conv_states, x, weight, bias, state_indices, silu, report},
      {x, states, a, b, "x", a_log, dt_bias, state_indices, elsewhere, scale, lower_bound, qk_l2norm, report},
      num_k_heads);
  if (!mixed) fail(op, "mixed must be given on CUDA, got None");
  Dim batch("batch_size", p.step.batch_size, "x"), channels("channels", p.conv.channels, "x");
  TensorCheck(op, "mixed", *mixed).device_as("x", x).dtype_as("x", x).shape({batch, channels}).contiguous();
  const OnDevice guard(x);
#if defined(ATTNOPS_HAS_SM90)
  if (sm90::launch(p.conv, p.step, current_stream(x))) return;
#endif
  void* rows = mixed->mutable_data_ptr();
  p.step.dtype == DType::kFloat32 ? p.put_rows(static_cast<float*>(rows), p.conv.channels)
                                  : p.put_rows(static_cast<uint16_t*>(rows), p.conv.channels);
  causal_conv1d::launch(p.conv, current_stream(x));
  delta_rule::launch(p.step, current_stream(x));
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(attnops, CUDA, m) { m.impl("delta_conv_decode", TORCH_BOX(&delta_conv_decode_cuda)); }

}  // namespace attnops::delta_conv
