#include <torch/csrc/stable/library.h>

#include "merge_state/checks.h"
#include "merge_state/cuda/launch.h"
#include "torch_bindings/stream.h"

namespace attnops::merge_state {
namespace {

void merge_state_cuda(const Tensor& out, const Tensor& lse, const Tensor& out_a, const Tensor& lse_a,
                      const Tensor& out_b, const Tensor& lse_b) {
  const Params params = checked_params(out, lse, out_a, lse_a, out_b, lse_b);
  const OnDevice guard(out);
  launch(params, current_stream(out));
}

void merge_states_cuda(const Tensor& out, const Tensor& lse, const Tensor& outs, const Tensor& lses) {
  const ManyParams params = checked_many_params(out, lse, outs, lses);
  const OnDevice guard(out);
  launch(params, current_stream(out));
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(attnops, CUDA, m) {
  m.impl("merge_state", TORCH_BOX(&merge_state_cuda));
  m.impl("merge_states", TORCH_BOX(&merge_states_cuda));
}

}  // namespace attnops::merge_state
