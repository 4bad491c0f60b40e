#pragma once
#include "block_lists/checks.h"

namespace attnops::block_lists {

// The op on any device, in the schema's order: checked, then run by `kRun(params, cache_seqlens)`.
template <void (*kRun)(const Params&, const Tensor&)>
void build_block_tables(const Tensor& block_tables, const Tensor& block_seqlens, const Tensor& block_list,
                        const Tensor& page_table, const OptionalTensor& kv_indptr, const Tensor& cache_seqlens,
                        const OptionalTensor& cu_seqlens_q, int64_t page_size, int64_t num_pages, int64_t block_size,
                        int64_t page_step, int64_t unit_step, int64_t head_step, bool causal,
                        const OptionalTensor& report, int64_t window_left) {
  kRun(Checker({.block_tables = block_tables,
                .block_seqlens = block_seqlens,
                .block_list = block_list,
                .page_table = page_table,
                .kv_indptr = kv_indptr,
                .cache_seqlens = cache_seqlens,
                .cu_seqlens_q = cu_seqlens_q,
                .page_size = page_size,
                .num_pages = num_pages,
                .block_size = block_size,
                .page_step = page_step,
                .unit_step = unit_step,
                .head_step = head_step,
                .causal = causal,
                .report = report,
                .window_left = window_left})
           .run(),
       cache_seqlens);
}

}  // namespace attnops::block_lists
