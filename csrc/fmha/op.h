#pragma once
#include "fmha/checks.h"

// The two ops, for any device: their arguments stand here once.
namespace attnops::fmha {

// Runs checked arguments on the device of q.
using Run = void (*)(const char* op, const Params& params, const Tensor& q);

template <Run kRun>
void fmha_varlen(const Tensor& out, const OptionalTensor& lse, const Tensor& q, const Tensor& k, const Tensor& v,
                 const Tensor& cu_seqlens_q, const Tensor& cu_seqlens_k, const Tensor& tile_order, int64_t tile_q,
                 double softmax_scale, bool causal, int64_t window_left, int64_t window_right, double logit_cap,
                 const OptionalTensor& sinks, const OptionalTensor& tree_mask, const OptionalTensor& k_scale,
                 const OptionalTensor& v_scale, const OptionalTensor& report, const OptionalTensor& semaphores,
                 const OptionalTensor& pieces, const OptionalTensor& partial, const OptionalTensor& hidden_keys) {
  const Arguments arguments{"fmha_varlen",
                            "k",
                            "v",
                            out,
                            lse,
                            q,
                            k,
                            v,
                            cu_seqlens_q,
                            tile_order,
                            tile_q,
                            softmax_scale,
                            causal,
                            window_left,
                            window_right,
                            logit_cap,
                            sinks,
                            tree_mask,
                            k_scale,
                            v_scale,
                            report,
                            semaphores,
                            pieces,
                            partial,
                            hidden_keys};
  kRun("fmha_varlen", Checker(arguments).ragged(cu_seqlens_k), q);
}

template <Run kRun>
void fmha_paged(const Tensor& out, const OptionalTensor& lse, const Tensor& q, const Tensor& k_pages,
                const Tensor& v_pages, const Tensor& page_table, const OptionalTensor& kv_indptr,
                const Tensor& cache_seqlens, const Tensor& cu_seqlens_q, const Tensor& tile_order, int64_t tile_q,
                double softmax_scale, bool causal, int64_t window_left, int64_t window_right, double logit_cap,
                const OptionalTensor& sinks, const OptionalTensor& tree_mask, const OptionalTensor& k_scale,
                const OptionalTensor& v_scale, const OptionalTensor& report, const OptionalTensor& semaphores,
                const OptionalTensor& pieces, const OptionalTensor& partial, const OptionalTensor& hidden_keys) {
  const Arguments arguments{"fmha_paged", "k_pages",    "v_pages",  out,        lse,           q,       k_pages,
                            v_pages,      cu_seqlens_q, tile_order, tile_q,     softmax_scale, causal,  window_left,
                            window_right, logit_cap,    sinks,      tree_mask,  k_scale,       v_scale, report,
                            semaphores,   pieces,       partial,    hidden_keys};
  kRun("fmha_paged", Checker(arguments).paged(page_table, kv_indptr, cache_seqlens), q);
}

}  // namespace attnops::fmha
