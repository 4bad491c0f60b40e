#include <torch/csrc/stable/library.h>

#include "layer_call/ops.h"
#include "mla_decode/impls.h"
#include "paged_kv/cuda/launch.h"
#include "torch_bindings/stream.h"
#include "xqa_decode/impls.h"

namespace attnops::layer_call {
namespace {

struct Cuda {
  template <class Call>
  static void prepare(Call& call) {
    call.launch_decode = select_launch(call.decode);
  }

  // Stores, then attends.
  template <class Call>
  static void run(const Call& call, int32_t device) {
    const OnDevice guard(device);
    CUstream_st* const stream = current_stream(device);
    if (call.store) paged_kv::launch(*call.store, stream);
    call.launch_decode(call.decode, stream);
  }
};

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(attnops, CUDA, m) {
  m.impl("_xqa_layer_bind", TORCH_BOX(&xqa_layer_bind));
  m.impl("xqa_layer", TORCH_BOX(&xqa_layer<Cuda>));
  m.impl("xqa_pages_layer", TORCH_BOX(&xqa_pages_layer<Cuda>));
  m.impl("_mla_layer_bind", TORCH_BOX(&mla_layer_bind));
  m.impl("mla_layer", TORCH_BOX(&mla_layer<Cuda>));
}

}  // namespace attnops::layer_call
