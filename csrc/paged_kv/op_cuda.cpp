#include <torch/csrc/stable/library.h>

#include "paged_kv/checks.h"
#include "paged_kv/cuda/launch.h"
#include "torch_bindings/stream.h"

namespace attnops::paged_kv {
namespace {

template <class Params>
void launch_on(const Tensor& tensor, const Params& params) {
  const OnDevice guard(tensor);
  launch(params, current_stream(tensor));
}

void build_page_table_cuda(const Tensor& page_table, const Tensor& req_to_token, const Tensor& req_pool_indices,
                           const Tensor& cache_seqlens, int64_t page_size, const OptionalTensor& slot_map,
                           const OptionalTensor& report) {
  launch_on(page_table,
            checked_page_table(page_table, req_to_token, req_pool_indices, cache_seqlens, page_size, slot_map, report));
}

void build_kv_indices_cuda(const Tensor& kv_indptr, const Tensor& kv_indices, const OptionalTensor& kv_last_page_len,
                           const Tensor& req_to_token, const Tensor& req_pool_indices, const Tensor& cache_seqlens,
                           int64_t page_size, const OptionalTensor& slot_map, const OptionalTensor& report,
                           const OptionalTensor& kv_start_idx) {
  launch_on(kv_indptr, checked_kv_indices(kv_indptr, kv_indices, kv_last_page_len, req_to_token, req_pool_indices,
                                          cache_seqlens, page_size, slot_map, report, kv_start_idx));
}

void build_cu_seqlens_cuda(const Tensor& cu_seqlens, const Tensor& seqlens) {
  launch_on(cu_seqlens, checked_cu_seqlens(cu_seqlens, seqlens));
}

void translate_slots_cuda(const Tensor& out, const Tensor& slots, const Tensor& slot_map,
                          const OptionalTensor& report) {
  launch_on(out, checked_translate(out, slots, slot_map, report));
}

void store_kv_cuda(const Tensor& k_pages, const Tensor& v_pages, const Tensor& k, const Tensor& v,
                   const Tensor& out_cache_loc, const OptionalTensor& k_scale, const OptionalTensor& v_scale,
                   const OptionalTensor& report) {
  launch_on(k_pages, checked_store_kv(k_pages, v_pages, k, v, out_cache_loc, k_scale, v_scale, report));
}

void store_mla_kv_cuda(const Tensor& kv_pages, const Tensor& latent, const OptionalTensor& k_pe,
                       const Tensor& out_cache_loc, const OptionalTensor& kv_scale, const OptionalTensor& report) {
  launch_on(kv_pages, checked_store_mla(kv_pages, latent, k_pe, out_cache_loc, kv_scale, report));
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(attnops, CUDA, m) {
  m.impl("build_page_table", TORCH_BOX(&build_page_table_cuda));
  m.impl("build_kv_indices", TORCH_BOX(&build_kv_indices_cuda));
  m.impl("build_cu_seqlens", TORCH_BOX(&build_cu_seqlens_cuda));
  m.impl("translate_slots", TORCH_BOX(&translate_slots_cuda));
  m.impl("store_kv", TORCH_BOX(&store_kv_cuda));
  m.impl("store_mla_kv", TORCH_BOX(&store_mla_kv_cuda));
}

}  // namespace attnops::paged_kv
