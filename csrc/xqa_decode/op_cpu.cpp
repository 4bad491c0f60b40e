#include <torch/csrc/stable/library.h>

#include "cpu/split_kv_plan.h"
#include "xqa_decode/checks.h"

namespace attnops::xqa_decode {
namespace {

void xqa_decode_plan_cpu(const Tensor& tile_scheduler_metadata, const Tensor& num_splits, const Tensor& cache_seqlens,
                         int64_t seqlen_q, int64_t num_kv_heads, int64_t window_left, int64_t fixed_split_tokens) {
  const PlanParams plan = checked_plan_params(tile_scheduler_metadata, num_splits, cache_seqlens, seqlen_q,
                                              num_kv_heads, window_left, fixed_split_tokens);
  attnops::cpu::SplitKvPlanner(plan.geometry, plan.tensors.cache_seqlens)
      .write(plan.tensors.tile_scheduler_metadata, plan.tensors.num_splits);
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(attnops, CPU, m) { m.impl("xqa_decode_plan", TORCH_BOX(&xqa_decode_plan_cpu)); }

}  // namespace attnops::xqa_decode
