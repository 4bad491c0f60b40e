#pragma once
#include "xqa_decode/checks.h"

namespace attnops::xqa_decode {

// Runs checked arguments on the device of q.
using Run = void (*)(const Params& params, const Tensor& q, const TableRows& rows);

// The op on any device, in the schema's order: checked, then run by `kRun`.
template <Run kRun>
void xqa_decode(const Tensor& out, const OptionalTensor& lse, const Tensor& q, const Tensor& k_pages,
                const Tensor& v_pages, const Tensor& page_table, const OptionalTensor& kv_indptr,
                const Tensor& cache_seqlens, const Tensor& tile_scheduler_metadata, const Tensor& num_splits,
                const Tensor& out_partial, const Tensor& lse_partial, const Tensor& semaphores, double softmax_scale,
                bool causal, int64_t window_left, double logit_cap, const OptionalTensor& sinks,
                const OptionalTensor& tree_mask, const OptionalTensor& k_scale, const OptionalTensor& v_scale,
                int64_t fixed_split_tokens, const OptionalTensor& report, int64_t tree_keys,
                const OptionalTensor& cu_seqlens_q, int64_t max_seqlen_q, const OptionalTensor& table_rows) {
  check_tree_keys_have_mask("xqa_decode", tree_keys, tree_mask.has_value());
  kRun(checked_params({.out = out,
                       .lse = lse,
                       .q = q,
                       .k_pages = k_pages,
                       .v_pages = v_pages,
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
                       .k_scale = k_scale,
                       .v_scale = v_scale,
                       .fixed_split_tokens = fixed_split_tokens,
                       .report = report,
                       .tree_keys = tree_keys,
                       .cu_seqlens_q = cu_seqlens_q,
                       .max_seqlen_q = max_seqlen_q,
                       .table_rows = table_rows}),
       q, table_rows_of(page_table, table_rows));
}

}  // namespace attnops::xqa_decode
