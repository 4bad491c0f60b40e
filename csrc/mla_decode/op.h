#pragma once
#include "mla_decode/checks.h"

namespace attnops::mla_decode {

// The op on any device, in the schema's order: checked, then run by `kRun(params, q)`.
template <void (*kRun)(const Params&, const Tensor&)>
void mla_decode(const Tensor& out, const OptionalTensor& lse, const Tensor& q, const OptionalTensor& q_pe,
                const Tensor& kv_pages, const Tensor& page_table, const OptionalTensor& kv_indptr,
                const Tensor& cache_seqlens, const Tensor& tile_scheduler_metadata, const Tensor& num_splits,
                const Tensor& out_partial, const Tensor& lse_partial, const Tensor& semaphores, double softmax_scale,
                bool causal, int64_t window_left, double logit_cap, const OptionalTensor& sinks,
                const OptionalTensor& tree_mask, const OptionalTensor& kv_scale, int64_t fixed_split_tokens,
                const OptionalTensor& report, bool fp8_products, int64_t tree_keys) {
  check_tree_keys_have_mask("mla_decode", tree_keys, tree_mask.has_value());
  kRun(checked_params({.out = out,
                       .lse = lse,
                       .q = q,
                       .q_pe = q_pe,
                       .kv_pages = kv_pages,
                       .page_table = page_table,
                       .kv_indptr = kv_indptr,
                       .cache_seqlens = cache_seqlens,
                       .tile_scheduler_metadata = tile_scheduler_metadata,
                       .num_splits = num_splits,
                       .out_partial = out_partial,
                       .lse_partial = lse_partial,
                       .semaphores = semaphores,
                       .softmax_scale = softmax_scale,
                       .causal = causal,
                       .window_left = window_left,
                       .logit_cap = logit_cap,
                       .sinks = sinks,
                       .tree_mask = tree_mask,
                       .kv_scale = kv_scale,
                       .fixed_split_tokens = fixed_split_tokens,
                       .report = report,
                       .fp8_products = fp8_products,
                       .tree_keys = tree_keys}),
       q);
}

}  // namespace attnops::mla_decode
