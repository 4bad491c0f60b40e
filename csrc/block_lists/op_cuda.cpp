#include <torch/csrc/stable/library.h>

#include "block_lists/cuda/launch.h"
#include "block_lists/op.h"
#include "torch_bindings/stream.h"

namespace attnops::block_lists {
namespace {

void run(const Params& params, const Tensor& cache_seqlens) {
  const OnDevice guard(cache_seqlens);
  launch(params, current_stream(cache_seqlens));
}

void label_scores_cuda(const Tensor& scores, const Tensor& q_labels, const Tensor& label_pages,
                       const Tensor& page_table, const Tensor& cache_seqlens, const OptionalTensor& report) {
  const ScoreParams params = checked_scores(scores, q_labels, label_pages, page_table, cache_seqlens, report);
  check_range("label_scores", "q_labels.shape[0] (batch_size)", params.num_requests, 0, 65535);
  check_range("label_scores", "label_pages.shape[2] (num_kv_heads)", params.num_kv_heads, 1, 65535);
  const OnDevice guard(q_labels);
  launch(params, current_stream(q_labels));
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(attnops, CUDA, m) {
  m.impl("build_block_tables", TORCH_BOX(&build_block_tables<&run>));
  m.impl("label_scores", TORCH_BOX(&label_scores_cuda));
}

}  // namespace attnops::block_lists
