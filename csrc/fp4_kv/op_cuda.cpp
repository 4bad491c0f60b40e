#include <torch/csrc/stable/library.h>

#include "fp4_kv/cuda/launch.h"
#include "fp4_kv/op.h"
#include "torch_bindings/stream.h"

namespace attnops::fp4_kv {
namespace {

template <class Params>
void launch_on(const Params& params, const Tensor& tensor) {
  const OnDevice guard(tensor);
  launch(params, current_stream(tensor));
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(attnops, CUDA, m) {
  m.impl("store_kv_fp4", TORCH_BOX(&store_op<&launch_on<StoreParams>>));
  m.impl("fp4_decode", TORCH_BOX(&decode_op<&launch_on<DecodeParams>>));
}

}  // namespace attnops::fp4_kv
