#include <torch/csrc/stable/library.h>

#include "mla_decode/checks.h"
#include "mla_decode/cuda/plan.h"
#include "mla_decode/impls.h"
#include "torch_bindings/stream.h"

namespace attnops::mla_decode {
namespace {

void mla_decode_plan_cuda(const Tensor& tile_scheduler_metadata, const Tensor& num_splits, const Tensor& cache_seqlens,
                          int64_t seqlen_q, int64_t num_q_heads, int64_t window_left, int64_t fixed_split_tokens) {
  const PlanParams plan = checked_plan_params(tile_scheduler_metadata, num_splits, cache_seqlens, seqlen_q, num_q_heads,
                                              window_left, fixed_split_tokens);
  const OnDevice guard(cache_seqlens);
  launch_plan(plan.geometry, plan.tensors.cache_seqlens, plan.tensors.tile_scheduler_metadata, plan.tensors.num_splits,
              current_stream(cache_seqlens));
}

void mla_decode_cuda(const Tensor& out, const std::optional<Tensor>& lse, const Tensor& q,
                     const std::optional<Tensor>& q_pe, const Tensor& kv_pages, const Tensor& page_table,
                     const std::optional<Tensor>& kv_indptr, const Tensor& cache_seqlens,
                     const Tensor& tile_scheduler_metadata, const Tensor& num_splits, const Tensor& out_partial,
                     const Tensor& lse_partial, const Tensor& semaphores, double softmax_scale, bool causal,
                     int64_t window_left, double logit_cap, const std::optional<Tensor>& sinks,
                     const std::optional<Tensor>& tree_mask, const std::optional<Tensor>& kv_scale,
                     int64_t fixed_split_tokens, const std::optional<Tensor>& report, bool fp8_products) {
  const Params p = checked_params({out,         lse,           q,
                                   q_pe,        kv_pages,      page_table,
                                   kv_indptr,   cache_seqlens, tile_scheduler_metadata,
                                   num_splits,  out_partial,   lse_partial,
                                   semaphores,  softmax_scale, causal,
                                   window_left, logit_cap,     sinks,
                                   tree_mask,   kv_scale,      fixed_split_tokens,
                                   report,      fp8_products});
  const OnDevice guard(q);
  select_launch(p)(p, current_stream(q));
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(attnops, CUDA, m) {
  m.impl("mla_decode_plan", TORCH_BOX(&mla_decode_plan_cuda));
  m.impl("mla_decode", TORCH_BOX(&mla_decode_cuda));
}

}  // namespace attnops::mla_decode
