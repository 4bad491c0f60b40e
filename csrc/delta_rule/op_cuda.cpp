#include <torch/csrc/stable/library.h>

#include "delta_rule/checks.h"
#include "delta_rule/cuda/launch.h"
#include "torch_bindings/stream.h"

namespace attnops::delta_rule {
namespace {

void delta_decode_cuda(const Tensor& out, const Tensor& states, const Tensor& q, const Tensor& k, const Tensor& v,
                       const Tensor& a, const Tensor& b, const OptionalTensor& a_log, const OptionalTensor& dt_bias,
                       const Tensor& state_indices, const OptionalTensor& out_state_indices, double scale,
                       double lower_bound, bool qk_l2norm, const OptionalTensor& report) {
  const LinearStep p = checked_decode({out, states, q, k, v, a, b, a_log, dt_bias, state_indices, out_state_indices,
                                       scale, lower_bound, qk_l2norm, report});
  refuse_float_gates("delta_decode", p);
  const OnDevice guard(q);
  launch(p, current_stream(q));
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(attnops, CUDA, m) { m.impl("delta_decode", TORCH_BOX(&delta_decode_cuda)); }

}  // namespace attnops::delta_rule
