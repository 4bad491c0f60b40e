#include <torch/csrc/stable/library.h>

#include "causal_conv1d/checks.h"
#include "causal_conv1d/cuda/launch.h"
#include "torch_bindings/stream.h"

namespace attnops::causal_conv1d {
namespace {

void causal_conv1d_cuda(const Tensor& out, const Tensor& conv_states, const Tensor& x, const Tensor& weight,
                        const OptionalTensor& bias, const Tensor& cu_seqlens, const Tensor& state_indices,
                        const OptionalTensor& has_initial_state, bool silu, const OptionalTensor& report) {
  const Params p =
      checked_varlen({out, conv_states, x, weight, bias, state_indices, silu, report}, cu_seqlens, has_initial_state);
  const OnDevice guard(x);
  launch(p, current_stream(x));
}

void causal_conv1d_update_cuda(const Tensor& out, const Tensor& conv_states, const Tensor& x, const Tensor& weight,
                               const OptionalTensor& bias, const Tensor& state_indices, bool silu,
                               const OptionalTensor& report, const OptionalTensor& windows,
                               const OptionalTensor& tree_mask) {
  const Arguments given{out, conv_states, x, weight, bias, state_indices, silu, report};
  if (windows) {
    const DraftParams p = checked_drafts(given, *windows, tree_mask);
    const OnDevice guard(x);
    return launch_drafts(p, current_stream(x));
  }
  refuse_mask_alone(tree_mask);
  const Params p = checked_update(given);
  const OnDevice guard(x);
  launch(p, current_stream(x));
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(attnops, CUDA, m) {
  m.impl("causal_conv1d", TORCH_BOX(&causal_conv1d_cuda));
  m.impl("causal_conv1d_update", TORCH_BOX(&causal_conv1d_update_cuda));
}

}  // namespace attnops::causal_conv1d
