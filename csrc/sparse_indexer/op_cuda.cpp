#include <torch/csrc/stable/library.h>

#include "sparse_indexer/checks.h"
#include "sparse_indexer/cuda/launch.h"
#include "sparse_indexer/logits_impls.h"
#include "sparse_indexer/topk_pieces.h"
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

void store_index_k_cuda(const Tensor& index_pages, const Tensor& k, const Tensor& out_cache_loc, bool hadamard,
                        bool ue8m0, const OptionalTensor& report) {
  const StoreIndexParams p = checked_store_index(index_pages, k, out_cache_loc, hadamard, ue8m0, report);
  const OnDevice guard(index_pages);
  launch(p, current_stream(index_pages));
}

void quantize_index_q_cuda(const Tensor& q_fp8, const Tensor& weights_out, const Tensor& q, const Tensor& weights,
                           double scale, bool hadamard, bool ue8m0) {
  const QuantizeQueryParams p = checked_quantize_query(q_fp8, weights_out, q, weights, scale, hadamard, ue8m0);
  const OnDevice guard(q);
  launch(p, current_stream(q));
}

void gather_index_k_cuda(const Tensor& k, const Tensor& k_scale, const Tensor& index_pages, const Tensor& page_table,
                         const Tensor& cu_seqlens_k, const OptionalTensor& report) {
  const GatherIndexParams p = checked_gather_index(k, k_scale, index_pages, page_table, cu_seqlens_k, report);
  const OnDevice guard(k);
  launch(p, current_stream(k));
}

void expand_rows_cuda(const Tensor& seqlens, const Tensor& rows, const Tensor& topk_length, const Tensor& cache_seqlens,
                      const Tensor& cu_seqlens_q, int64_t topk, int64_t ratio, const OptionalTensor& report) {
  const ExpandParams p = checked_expand(seqlens, rows, topk_length, cache_seqlens, cu_seqlens_q, topk, ratio, report);
  const OnDevice guard(seqlens);
  launch(p, current_stream(seqlens));
}

void index_logits_paged_cuda(const Tensor& logits, const Tensor& q, const Tensor& index_pages, const Tensor& page_table,
                             const Tensor& weights, const Tensor& cache_seqlens, const OptionalTensor& report) {
  const LogitsParams p = checked_logits_paged(logits, q, index_pages, page_table, weights, cache_seqlens, report);
  const OnDevice guard(q);
  launch_logits("index_logits_paged", p, current_stream(q));
}

void index_logits_cuda(const Tensor& logits, const Tensor& q, const Tensor& k, const Tensor& k_scale,
                       const Tensor& weights, const Tensor& k_start, const Tensor& k_end, bool compressed,
                       const OptionalTensor& report) {
  const LogitsParams p = checked_logits(logits, q, k, k_scale, weights, k_start, k_end, compressed, report);
  const OnDevice guard(q);
  launch_logits("index_logits", p, current_stream(q));
}

// The kernels of each part wait for those before them, so the scratch serves one part after the other.
void index_topk_cuda(const Tensor& indices, const OptionalTensor& positions, const Tensor& q, const Tensor& index_pages,
                     const Tensor& page_table, const Tensor& weights, const Tensor& cache_seqlens,
                     const Tensor& scratch, const OptionalTensor& report, const OptionalTensor& k_start) {
  const IndexTopkParams p = checked_index_topk(indices, positions, q, index_pages, page_table, weights, cache_seqlens,
                                               scratch, report, k_start);
  const OnDevice guard(q);
  CUstream_st* const stream = current_stream(q);
  const auto run = [&](const IndexTopkParams& part) {
    launch_logits("index_topk", part.logits, stream);
    launch(part.select, stream);
  };
  if (p.piece_keys == 0) return for_each_part(p, run);
  for_each_part(p, [&](const IndexTopkParams& part) {
    for_each_piece(
        part, [&](const PieceParams& piece) { launch_begin(piece, stream); }, run,
        [&](const PieceParams& piece) { launch_carry(piece, stream); });
  });
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(attnops, CUDA, m) {
  m.impl("topk_select", TORCH_BOX(&topk_select_cuda));
  m.impl("store_index_k", TORCH_BOX(&store_index_k_cuda));
  m.impl("quantize_index_q", TORCH_BOX(&quantize_index_q_cuda));
  m.impl("gather_index_k", TORCH_BOX(&gather_index_k_cuda));
  m.impl("expand_rows", TORCH_BOX(&expand_rows_cuda));
  m.impl("index_logits_paged", TORCH_BOX(&index_logits_paged_cuda));
  m.impl("index_logits", TORCH_BOX(&index_logits_cuda));
  m.impl("index_topk", TORCH_BOX(&index_topk_cuda));
}

}  // namespace attnops::sparse_indexer
