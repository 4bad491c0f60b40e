#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>

#include "speculation/checks.h"
#include "speculation/cpu/reference.h"
#include "torch_bindings/cpu_faults.h"

namespace attnops::speculation {
namespace {

// Runs `run` over the requests of `params`, and fails at the first fault where no report was given.
template <class Params, class Run>
void by_request(const char* op, Params params, int64_t grain, const Run& run) {
  CpuFaults faults(op, "", params.report);
  params.report = faults.report();
  torch::stable::parallel_for(0, params.batch_size, grain,
                              [&](int64_t begin, int64_t end) { run(params, begin, end); });
  faults.check();
}

void build_draft_tree_cpu(const Tensor& tree_mask, const Tensor& positions, const Tensor& retrieve_index,
                          const Tensor& next_token, const Tensor& next_sibling, const OptionalTensor& tokens,
                          const Tensor& parent_list, const Tensor& top_scores_index, const OptionalTensor& draft_tokens,
                          const OptionalTensor& bonus_tokens, const Tensor& cache_seqlens, int64_t topk,
                          const OptionalTensor& report) {
  by_request("build_draft_tree",
             checked_build(tree_mask, positions, retrieve_index, next_token, next_sibling, tokens, parent_list,
                           top_scores_index, draft_tokens, bonus_tokens, cache_seqlens, topk, report),
             16, cpu::build_draft_tree);
}

void verify_tree_greedy_cpu(const Tensor& predicts, const Tensor& accept_index, const Tensor& accept_token_num,
                            const Tensor& candidates, const Tensor& retrieve_index, const Tensor& next_token,
                            const Tensor& next_sibling, const Tensor& target_predict, const OptionalTensor& report) {
  by_request("verify_tree_greedy",
             checked_greedy({predicts, accept_index, accept_token_num, candidates, retrieve_index, next_token,
                             next_sibling, report},
                            target_predict),
             64, cpu::verify_tree_greedy);
}

void verify_tree_sampling_cpu(const Tensor& predicts, const Tensor& accept_index, const Tensor& accept_token_num,
                              const Tensor& candidates, const Tensor& retrieve_index, const Tensor& next_token,
                              const Tensor& next_sibling, const Tensor& uniform_samples,
                              const Tensor& uniform_samples_final, const Tensor& target_probs,
                              const OptionalTensor& draft_probs, double threshold_single, double threshold_acc,
                              const OptionalTensor& report) {
  by_request(
      "verify_tree_sampling",
      checked_sampling(
          {predicts, accept_index, accept_token_num, candidates, retrieve_index, next_token, next_sibling, report},
          uniform_samples, uniform_samples_final, target_probs, draft_probs, threshold_single, threshold_acc),
      1, cpu::verify_tree_sampling);
}

// `slots` is the argument that slots come from, for messages.
template <class Moves>
void move_all(const char* op, const char* slots, Moves moves, int batch_size, const std::vector<Buffers>& launches) {
  CpuFaults faults(op, slots, moves.report());
  moves.report() = faults.report();
  for (const Buffers& buffers : launches) {
    torch::stable::parallel_for(0, batch_size, 1,
                                [&](int64_t begin, int64_t end) { cpu::move_rows(moves, buffers, begin, end); });
  }
  cpu::finish_moves(moves, launches[0], 0, batch_size);
  faults.check();
}

void move_kv_cpu(const Tensor& accept_index, const Tensor& out_cache_loc, const TensorList& pages,
                 const TensorList& window_pages, const OptionalTensor& slot_map, const OptionalTensor& req_to_token,
                 const OptionalTensor& req_pool_indices, const OptionalTensor& cache_seqlens,
                 const OptionalTensor& report) {
  Dim page_size("page_size");
  const auto launches =
      checked_buffers("move_kv", pages, window_pages, slot_map, page_size, "accept_index", accept_index);
  const MoveParams p = checked_move(accept_index, out_cache_loc, req_to_token, req_pool_indices, cache_seqlens, report);
  move_all("move_kv", "out_cache_loc", AcceptedMoves{p}, p.batch_size, launches);
}

void copy_page_tail_cpu(const Tensor& req_to_token, const Tensor& req_pool_indices, const Tensor& cache_seqlens,
                        const TensorList& pages, const TensorList& window_pages, int64_t topk, int64_t draft_steps,
                        const OptionalTensor& slot_map, const OptionalTensor& report) {
  const TailCall call(req_to_token, req_pool_indices, cache_seqlens, pages, window_pages, topk, draft_steps, slot_map,
                      report);
  move_all("copy_page_tail", "", TailMoves{call.requests}, call.requests.batch_size, call.launches);
}

void draft_kv_indices_cpu(const Tensor& kv_indptr, const Tensor& kv_indices, const Tensor& req_to_token,
                          const Tensor& req_pool_indices, const Tensor& cache_seqlens, int64_t topk,
                          int64_t draft_steps, int64_t page_size, const OptionalTensor& report) {
  DraftIndicesParams params = checked_draft_indices(kv_indptr, kv_indices, req_to_token, req_pool_indices,
                                                    cache_seqlens, topk, draft_steps, page_size, report);
  CpuFaults faults("generate_draft_decode_kv_indices", "", params.requests.report);
  params.requests.report = faults.report();
  cpu::draft_kv_indices(params);
  faults.check();
}

void pack_tree_mask_cpu(const Tensor& tree_mask, const Tensor& mask, int64_t mode, const OptionalTensor& mask_indptr,
                        const OptionalTensor& report) {
  by_request("pack_tree_mask", checked_pack(tree_mask, mask, mode, mask_indptr, report), 4, cpu::pack_tree_mask);
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(attnops, CPU, m) {
  m.impl("build_draft_tree", TORCH_BOX(&build_draft_tree_cpu));
  m.impl("verify_tree_greedy", TORCH_BOX(&verify_tree_greedy_cpu));
  m.impl("verify_tree_sampling", TORCH_BOX(&verify_tree_sampling_cpu));
  m.impl("move_kv", TORCH_BOX(&move_kv_cpu));
  m.impl("copy_page_tail", TORCH_BOX(&copy_page_tail_cpu));
  m.impl("generate_draft_decode_kv_indices", TORCH_BOX(&draft_kv_indices_cpu));
  m.impl("pack_tree_mask", TORCH_BOX(&pack_tree_mask_cpu));
}

}  // namespace attnops::speculation
