#include <torch/csrc/stable/library.h>

#include "local_batches/checks.h"
#include "local_batches/cuda/launch.h"
#include "torch_bindings/stream.h"

namespace attnops::local_batches {
namespace {

void build_cuda(const Tensor& local_cu_seqlens_q, const Tensor& local_cache_seqlens, const Tensor& local_page_table,
                const Tensor& cu_seqlens_q, const Tensor& cache_seqlens, const Tensor& page_table, int64_t page_size,
                int64_t chunk_size) {
  const Params p = checked_params(local_cu_seqlens_q, local_cache_seqlens, local_page_table, cu_seqlens_q,
                                  cache_seqlens, page_table, page_size, chunk_size);
  const OnDevice guard(cache_seqlens);
  launch(p, current_stream(cache_seqlens));
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(attnops, CUDA, m) { m.impl("build_local_batches", TORCH_BOX(&build_cuda)); }

}  // namespace attnops::local_batches
