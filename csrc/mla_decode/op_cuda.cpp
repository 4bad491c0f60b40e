#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/library.h>

#include "mla_decode/checks.h"
#include "mla_decode/cuda/plan.h"
#include "torch_bindings/stream.h"

namespace attnops::mla_decode {
namespace {

void mla_decode_plan_cuda(const Tensor& tile_scheduler_metadata, const Tensor& num_splits, const Tensor& cache_seqlens,
                          int64_t seqlen_q, int64_t num_q_heads, int64_t window_left, int64_t fixed_split_tokens) {
  const PlanParams plan = checked_plan_params(tile_scheduler_metadata, num_splits, cache_seqlens, seqlen_q, num_q_heads,
                                              window_left, fixed_split_tokens);
  const torch::stable::accelerator::DeviceGuard guard(cache_seqlens.get_device_index());
  launch_plan(plan.geometry, plan.tensors.cache_seqlens, plan.tensors.tile_scheduler_metadata, plan.tensors.num_splits,
              current_stream(cache_seqlens));
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(attnops, CUDA, m) { m.impl("mla_decode_plan", TORCH_BOX(&mla_decode_plan_cuda)); }

}  // namespace attnops::mla_decode
