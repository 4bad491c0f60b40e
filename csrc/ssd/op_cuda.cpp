#include <torch/csrc/stable/library.h>

#include "ssd/checks.h"
#include "ssd/cuda/launch.h"
#include "torch_bindings/stream.h"

namespace attnops::ssd {
namespace {

void ssd_decode_cuda(const Tensor& out, const Tensor& states, const Tensor& x, const OptionalTensor& dt,
                     const Tensor& a, const Tensor& b, const Tensor& c, const OptionalTensor& d,
                     const OptionalTensor& dt_bias, const OptionalTensor& z, const Tensor& state_indices,
                     const OptionalTensor& out_state_indices, double scale, bool dt_softplus,
                     const OptionalTensor& report) {
  const LinearStep p = checked_decode(
      {out, states, x, dt, a, b, c, d, dt_bias, z, state_indices, out_state_indices, scale, dt_softplus, report});
  refuse_float_gates("ssd_decode", p);
  const OnDevice guard(x);
  launch(p, current_stream(x));
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(attnops, CUDA, m) { m.impl("ssd_decode", TORCH_BOX(&ssd_decode_cuda)); }

}  // namespace attnops::ssd
