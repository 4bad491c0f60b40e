#include <torch/csrc/stable/library.h>

#include "local_batches/checks.h"

namespace attnops::local_batches {
namespace {

void build_cpu(const Tensor& local_cu_seqlens_q, const Tensor& local_cache_seqlens, const Tensor& local_page_table,
               const Tensor& cu_seqlens_q, const Tensor& cache_seqlens, const Tensor& page_table, int64_t page_size,
               int64_t chunk_size) {
  const Params p = checked_params(local_cu_seqlens_q, local_cache_seqlens, local_page_table, cu_seqlens_q,
                                  cache_seqlens, page_table, page_size, chunk_size);
  int64_t v = 0;
  for (int64_t b = 0; b < p.batch_size; ++b) {
    const int64_t chunks = p.request(b).num_chunks;
    for (int64_t i = 0; i < chunks && v < p.max_local; ++i) p.write(v++, b, i, 0, 1);
  }
  for (; v <= p.max_local; ++v) p.write_unused(v);
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(attnops, CPU, m) { m.impl("build_local_batches", TORCH_BOX(&build_cpu)); }

}  // namespace attnops::local_batches
