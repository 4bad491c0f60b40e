#include <torch/csrc/stable/library.h>

#include "torch_bindings/stream.h"
#include "xqa_decode/checks.h"
#include "xqa_decode/cuda/plan.h"
#include "xqa_decode/impls.h"

namespace attnops::xqa_decode {
namespace {

void xqa_decode_plan_cuda(const Tensor& tile_scheduler_metadata, const Tensor& num_splits, const Tensor& cache_seqlens,
                          int64_t seqlen_q, int64_t num_kv_heads, int64_t window_left, int64_t fixed_split_tokens) {
  PlanParams plan = checked_plan_params(tile_scheduler_metadata, num_splits, cache_seqlens, seqlen_q, num_kv_heads,
                                        window_left, fixed_split_tokens);
  SplitKvGeometry& geometry = plan.geometry;
  if (heads_side_by_side(geometry.num_sm_parts, geometry.works_per_request)) {
    geometry.parts_per_group = geometry.works_per_request;
    geometry.works_per_request = 1;
  }
  const OnDevice guard(cache_seqlens);
  launch_plan(plan.geometry, plan.tensors.cache_seqlens, plan.tensors.tile_scheduler_metadata, plan.tensors.num_splits,
              current_stream(cache_seqlens));
}

void xqa_decode_cuda(const Tensor& out, const std::optional<Tensor>& lse, const Tensor& q, const Tensor& k_pages,
                     const Tensor& v_pages, const Tensor& page_table, const std::optional<Tensor>& kv_indptr,
                     const Tensor& cache_seqlens, const Tensor& tile_scheduler_metadata, const Tensor& num_splits,
                     const Tensor& out_partial, const Tensor& lse_partial, const Tensor& semaphores,
                     double softmax_scale, bool causal, int64_t window_left, double logit_cap,
                     const std::optional<Tensor>& sinks, const std::optional<Tensor>& tree_mask,
                     const std::optional<Tensor>& k_scale, const std::optional<Tensor>& v_scale,
                     int64_t fixed_split_tokens, const std::optional<Tensor>& report) {
  const Params params = checked_params({out,
                                        lse,
                                        q,
                                        k_pages,
                                        v_pages,
                                        page_table,
                                        kv_indptr,
                                        cache_seqlens,
                                        tile_scheduler_metadata,
                                        num_splits,
                                        out_partial,
                                        lse_partial,
                                        semaphores,
                                        softmax_scale,
                                        causal,
                                        window_left,
                                        logit_cap,
                                        sinks,
                                        tree_mask,
                                        k_scale,
                                        v_scale,
                                        fixed_split_tokens,
                                        report});
  const OnDevice guard(q);
  select_launch(params)(params, current_stream(q));
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(attnops, CUDA, m) {
  m.impl("xqa_decode_plan", TORCH_BOX(&xqa_decode_plan_cuda));
  m.impl("xqa_decode", TORCH_BOX(&xqa_decode_cuda));
}

}  // namespace attnops::xqa_decode
