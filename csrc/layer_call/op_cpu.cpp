#include <torch/csrc/stable/library.h>

#include "layer_call/ops.h"

namespace attnops::layer_call {
namespace {

template <class Call>
void run_on_cpu(const Call& call, const Tensor&) {
  if (call.store) run_cpu(*call.store);
  run_cpu(call.decode);
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(attnops, CPU, m) {
  m.impl("xqa_layer_bind", TORCH_BOX(&xqa_layer_bind));
  m.impl("xqa_layer", TORCH_BOX(&xqa_layer<&run_on_cpu<XqaCall>>));
  m.impl("mla_layer_bind", TORCH_BOX(&mla_layer_bind));
  m.impl("mla_layer", TORCH_BOX(&mla_layer<&run_on_cpu<MlaCall>>));
}

}  // namespace attnops::layer_call
