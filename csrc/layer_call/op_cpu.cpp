#include <torch/csrc/stable/library.h>

#include "layer_call/ops.h"

namespace attnops::layer_call {
namespace {

struct Cpu {
  template <class Call>
  static void prepare(Call&) {}

  template <class Call>
  static void run(const Call& call, int32_t) {
    if (call.store) run_cpu(*call.store);
    run_cpu(call.decode);
  }
};

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(attnops, CPU, m) {
  m.impl("_xqa_layer_bind", TORCH_BOX(&xqa_layer_bind));
  m.impl("xqa_layer", TORCH_BOX(&xqa_layer<Cpu>));
  m.impl("xqa_pages_layer", TORCH_BOX(&xqa_pages_layer<Cpu>));
  m.impl("_mla_layer_bind", TORCH_BOX(&mla_layer_bind));
  m.impl("mla_layer", TORCH_BOX(&mla_layer<Cpu>));
}

}  // namespace attnops::layer_call
