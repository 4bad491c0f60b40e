#include <torch/csrc/stable/library.h>

#include "sparse_indexer/checks.h"
#include "sparse_indexer/cuda/launch.h"
#include "torch_bindings/stream.h"

namespace attnops::sparse_indexer {
namespace {

void topk_select_cuda(const Tensor& indices, const OptionalTensor& positions, const Tensor& logits,
                      const Tensor& lengths, const OptionalTensor& row_starts, const OptionalTensor& page_table,
                      const OptionalTensor& row_to_request, int64_t page_size, const OptionalTensor& offsets,
                      const OptionalTensor& report) {
  const SelectParams p = checked_select(
      {indices, positions, logits, lengths, row_starts, page_table, row_to_request, page_size, offsets, report});
  const OnDevice guard(logits);
  launch(p, current_stream(logits));
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(attnops, CUDA, m) { m.impl("topk_select", TORCH_BOX(&topk_select_cuda)); }

}  // namespace attnops::sparse_indexer
