#include <torch/csrc/stable/library.h>

#include "linear_state/checks.h"
#include "linear_state/cuda/launch.h"
#include "torch_bindings/stream.h"

namespace attnops::linear_state {
namespace {

void copy_states_cuda(const Tensor& states, const Tensor& src, const Tensor& dst, const OptionalTensor& report,
                      const OptionalTensor& source) {
  const Params p = checked_params("copy_states", kReportCopyStates, states, &src, dst, "dst", report, source);
  const OnDevice guard(states);
  launch(p, current_stream(states));
}

void clear_states_cuda(const Tensor& states, const Tensor& slots, const OptionalTensor& report) {
  const Params p =
      checked_params("clear_states", kReportClearStates, states, nullptr, slots, "slots", report, OptionalTensor());
  const OnDevice guard(states);
  launch(p, current_stream(states));
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(attnops, CUDA, m) {
  m.impl("copy_states", TORCH_BOX(&copy_states_cuda));
  m.impl("clear_states", TORCH_BOX(&clear_states_cuda));
}

}  // namespace attnops::linear_state
