#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/library.h>

#include "layer_call/ops.h"
#include "mla_decode/impls.h"
#include "paged_kv/cuda/launch.h"
#include "torch_bindings/stream.h"
#include "xqa_decode/impls.h"

namespace attnops::layer_call {
namespace {

// Stores, then attends: two launches of one op call.
template <class Call>
void run_cuda(const Call& call, const Tensor& q) {
  const torch::stable::accelerator::DeviceGuard guard(q.get_device_index());
  CUstream_st* stream = current_stream(q);
  if (call.store) paged_kv::launch(*call.store, stream);
  launch(call.decode, stream);
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(attnops, CUDA, m) {
  m.impl("xqa_layer_bind", TORCH_BOX(&xqa_layer_bind));
  m.impl("xqa_layer", TORCH_BOX(&xqa_layer<&run_cuda<XqaCall>>));
  m.impl("mla_layer_bind", TORCH_BOX(&mla_layer_bind));
  m.impl("mla_layer", TORCH_BOX(&mla_layer<&run_cuda<MlaCall>>));
}

}  // namespace attnops::layer_call
