#pragma once
#include "fp4_kv/checks.h"

// The ops' arguments, for both devices.
namespace attnops::fp4_kv {

template <void (*kRun)(const StoreParams&, const Tensor&)>
void store_op(const Tensor& k_pages, const OptionalTensor& v_pages, const Tensor& k_block_scales,
              const OptionalTensor& v_block_scales, const Tensor& k, const OptionalTensor& v,
              const Tensor& out_cache_loc, const OptionalTensor& k_scale, const OptionalTensor& v_scale,
              const OptionalTensor& report) {
  kRun(checked_store(k_pages, v_pages, k_block_scales, v_block_scales, k, v, out_cache_loc, k_scale, v_scale, report),
       k_pages);
}

template <void (*kRun)(const DecodeParams&, const Tensor&)>
void decode_op(const Tensor& out, const OptionalTensor& lse, const Tensor& q, const Tensor& k_pages,
               const OptionalTensor& v_pages, const Tensor& k_block_scales, const OptionalTensor& v_block_scales,
               const Tensor& page_table, const OptionalTensor& kv_indptr, const Tensor& cache_seqlens,
               double softmax_scale, int64_t window_left, double logit_cap, const OptionalTensor& sinks,
               const OptionalTensor& k_scale, const OptionalTensor& v_scale, const OptionalTensor& report,
               const OptionalTensor& out_partial, const OptionalTensor& lse_partial) {
  kRun(checked_decode({out, lse, q, k_pages, v_pages, k_block_scales, v_block_scales, page_table, kv_indptr,
                       cache_seqlens, softmax_scale, window_left, logit_cap, sinks, k_scale, v_scale, report,
                       out_partial, lse_partial}),
       q);
}

}  // namespace attnops::fp4_kv
