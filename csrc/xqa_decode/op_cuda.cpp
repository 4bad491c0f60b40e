#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/library.h>

#include "torch_bindings/stream.h"
#include "xqa_decode/checks.h"
#include "xqa_decode/cuda/plan.h"

namespace attnops::xqa_decode {
namespace {

void xqa_decode_plan_cuda(const Tensor& tile_scheduler_metadata, const Tensor& num_splits, const Tensor& cache_seqlens,
                          int64_t seqlen_q, int64_t num_kv_heads, int64_t window_left, int64_t fixed_split_tokens) {
  const PlanParams plan = checked_plan_params(tile_scheduler_metadata, num_splits, cache_seqlens, seqlen_q,
                                              num_kv_heads, window_left, fixed_split_tokens);
  const torch::stable::accelerator::DeviceGuard guard(cache_seqlens.get_device_index());
  launch_plan(plan.geometry, plan.tensors.cache_seqlens, plan.tensors.tile_scheduler_metadata, plan.tensors.num_splits,
              current_stream(cache_seqlens));
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(attnops, CUDA, m) { m.impl("xqa_decode_plan", TORCH_BOX(&xqa_decode_plan_cuda)); }

}  // namespace attnops::xqa_decode
