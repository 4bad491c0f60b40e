#include <torch/csrc/stable/library.h>

#include "speculation/checks.h"
#include "speculation/cuda/launch.h"
#include "torch_bindings/stream.h"

namespace attnops::speculation {
namespace {

void build_draft_tree_cuda(const Tensor& tree_mask, const Tensor& positions, const Tensor& retrieve_index,
                           const Tensor& next_token, const Tensor& next_sibling, const OptionalTensor& tokens,
                           const Tensor& parent_list, const Tensor& top_scores_index,
                           const OptionalTensor& draft_tokens, const OptionalTensor& bonus_tokens,
                           const Tensor& cache_seqlens, int64_t topk, const OptionalTensor& report) {
  const BuildTreeParams params =
      checked_build(tree_mask, positions, retrieve_index, next_token, next_sibling, tokens, parent_list,
                    top_scores_index, draft_tokens, bonus_tokens, cache_seqlens, topk, report);
  const OnDevice guard(tree_mask);
  launch(params, current_stream(tree_mask));
}

void verify_tree_greedy_cuda(const Tensor& predicts, const Tensor& accept_index, const Tensor& accept_token_num,
                             const Tensor& candidates, const Tensor& retrieve_index, const Tensor& next_token,
                             const Tensor& next_sibling, const Tensor& target_predict, const OptionalTensor& report) {
  const VerifyParams params = checked_greedy(
      {predicts, accept_index, accept_token_num, candidates, retrieve_index, next_token, next_sibling, report},
      target_predict);
  const OnDevice guard(predicts);
  launch_greedy(params, current_stream(predicts));
}

void verify_tree_sampling_cuda(const Tensor& predicts, const Tensor& accept_index, const Tensor& accept_token_num,
                               const Tensor& candidates, const Tensor& retrieve_index, const Tensor& next_token,
                               const Tensor& next_sibling, const Tensor& uniform_samples,
                               const Tensor& uniform_samples_final, const Tensor& target_probs,
                               const OptionalTensor& draft_probs, double threshold_single, double threshold_acc,
                               const OptionalTensor& report) {
  const VerifyParams params = checked_sampling(
      {predicts, accept_index, accept_token_num, candidates, retrieve_index, next_token, next_sibling, report},
      uniform_samples, uniform_samples_final, target_probs, draft_probs, threshold_single, threshold_acc);
  const OnDevice guard(predicts);
  launch_sampling(params, current_stream(predicts));
}

void move_kv_cuda(const Tensor& accept_index, const Tensor& out_cache_loc, const TensorList& pages,
                  const TensorList& window_pages, const OptionalTensor& slot_map, const OptionalTensor& req_to_token,
                  const OptionalTensor& req_pool_indices, const OptionalTensor& cache_seqlens,
                  const OptionalTensor& report) {
  Dim page_size("page_size");
  const auto launches =
      checked_buffers("move_kv", pages, window_pages, slot_map, page_size, "accept_index", accept_index);
  const MoveParams p = checked_move(accept_index, out_cache_loc, req_to_token, req_pool_indices, cache_seqlens, report);
  const OnDevice guard(accept_index);
  for (const Buffers& buffers : launches) {
    launch(AcceptedMoves{p}, p.batch_size, 1, buffers, &buffers == launches.data(), current_stream(accept_index));
  }
}

void copy_page_tail_cuda(const Tensor& req_to_token, const Tensor& req_pool_indices, const Tensor& cache_seqlens,
                         const TensorList& pages, const TensorList& window_pages, int64_t topk, int64_t draft_steps,
                         const OptionalTensor& slot_map, const OptionalTensor& report) {
  const TailCall call(req_to_token, req_pool_indices, cache_seqlens, pages, window_pages, topk, draft_steps, slot_map,
                      report);
  const TailMoves moves{call.requests};
  const OnDevice guard(req_to_token);
  for (const Buffers& buffers : call.launches) {
    launch(moves, call.requests.batch_size, moves.groups(), buffers, &buffers == call.launches.data(),
           current_stream(req_to_token));
  }
}

void draft_kv_indices_cuda(const Tensor& kv_indptr, const Tensor& kv_indices, const Tensor& req_to_token,
                           const Tensor& req_pool_indices, const Tensor& cache_seqlens, int64_t topk,
                           int64_t draft_steps, int64_t page_size, const OptionalTensor& report) {
  const DraftIndicesParams params = checked_draft_indices(kv_indptr, kv_indices, req_to_token, req_pool_indices,
                                                          cache_seqlens, topk, draft_steps, page_size, report);
  const OnDevice guard(kv_indptr);
  launch(params, current_stream(kv_indptr));
}

void pack_tree_mask_cuda(const Tensor& tree_mask, const Tensor& mask, int64_t mode, const OptionalTensor& mask_indptr,
                         const OptionalTensor& report) {
  const PackMaskParams params = checked_pack(tree_mask, mask, mode, mask_indptr, report);
  const OnDevice guard(tree_mask);
  launch(params, current_stream(tree_mask));
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(attnops, CUDA, m) {
  m.impl("build_draft_tree", TORCH_BOX(&build_draft_tree_cuda));
  m.impl("verify_tree_greedy", TORCH_BOX(&verify_tree_greedy_cuda));
  m.impl("verify_tree_sampling", TORCH_BOX(&verify_tree_sampling_cuda));
  m.impl("move_kv", TORCH_BOX(&move_kv_cuda));
  m.impl("copy_page_tail", TORCH_BOX(&copy_page_tail_cuda));
  m.impl("generate_draft_decode_kv_indices", TORCH_BOX(&draft_kv_indices_cuda));
  m.impl("pack_tree_mask", TORCH_BOX(&pack_tree_mask_cuda));
}

}  // namespace attnops::speculation
