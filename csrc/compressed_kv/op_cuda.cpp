#include <torch/csrc/stable/library.h>

#include "compressed_kv/checks.h"
#include "compressed_kv/cuda/launch.h"
#include "torch_bindings/stream.h"

namespace attnops::compressed_kv {
namespace {

void compress_plan_cuda(const Tensor& entry_indptr, const Tensor& cache_seqlens, const Tensor& cu_seqlens_q,
                        int64_t ratio, const OptionalTensor& report) {
  const PlanParams p = checked_plan(entry_indptr, cache_seqlens, cu_seqlens_q, ratio, report);
  const OnDevice guard(cache_seqlens);
  launch(p, current_stream(cache_seqlens));
}

void compress_kv_cuda(const Tensor& kv_pages, const Tensor& state, const Tensor& kv_score, const Tensor& ape,
                      const Tensor& norm_weight, const Tensor& cos_sin, const Tensor& page_table,
                      const Tensor& state_indices, const Tensor& cache_seqlens, const Tensor& cu_seqlens_q,
                      const Tensor& entry_indptr, int64_t ratio, double eps, bool interleaved, bool hadamard,
                      bool ue8m0, const OptionalTensor& report) {
  const Params p =
      checked_params({kv_pages, state, kv_score, ape, norm_weight, cos_sin, page_table, state_indices, cache_seqlens,
                      cu_seqlens_q, entry_indptr, ratio, eps, interleaved, hadamard, ue8m0, report});
  const OnDevice guard(kv_pages);
  launch(p, current_stream(kv_pages));
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(attnops, CUDA, m) {
  m.impl("compress_plan", TORCH_BOX(&compress_plan_cuda));
  m.impl("compress_kv", TORCH_BOX(&compress_kv_cuda));
}

}  // namespace attnops::compressed_kv
