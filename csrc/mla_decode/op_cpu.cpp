#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>

#include "mla_decode/checks.h"
#include "mla_decode/cpu/impls.h"
#include "mla_decode/cpu/pieces.h"

namespace attnops::mla_decode {
namespace {

// Plan rows per task of the merge: enough that a task outweighs its dispatch.
constexpr int64_t kMergeGrain = 16;

void mla_decode_cpu(const Tensor& out, const std::optional<Tensor>& lse, const Tensor& q,
                    const std::optional<Tensor>& q_pe, const Tensor& kv_pages, const Tensor& page_table,
                    const std::optional<Tensor>& kv_indptr, const Tensor& cache_seqlens,
                    const Tensor& tile_scheduler_metadata, const Tensor& num_splits, const Tensor& out_partial,
                    const Tensor& lse_partial, const Tensor& semaphores, double softmax_scale, bool causal,
                    int64_t window_left, double logit_cap, const std::optional<Tensor>& sinks,
                    const std::optional<Tensor>& tree_mask, const std::optional<Tensor>& kv_scale,
                    int64_t fixed_split_tokens, const std::optional<Tensor>& report) {
  const Params p = checked_params({out,         lse,           q,
                                   q_pe,        kv_pages,      page_table,
                                   kv_indptr,   cache_seqlens, tile_scheduler_metadata,
                                   num_splits,  out_partial,   lse_partial,
                                   semaphores,  softmax_scale, causal,
                                   window_left, logit_cap,     sinks,
                                   tree_mask,   kv_scale,      fixed_split_tokens,
                                   report});
  if (p.batch_size == 0) return;
  const cpu::RunPiece run = cpu::select_kernel(p);
  torch::stable::parallel_for(0, p.num_sm_parts, 1, [&](int64_t begin, int64_t end) {
    for (int64_t part = begin; part < end; ++part) cpu::run_part(p, static_cast<int>(part), run);
  });

  if (p.fixed_split_tokens == 0) {
    const int64_t rows = static_cast<int64_t>(p.num_sm_parts) * kPlanRows;
    torch::stable::parallel_for(0, rows, kMergeGrain, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) {
        cpu::merge_balanced(p, static_cast<int>(i / kPlanRows), static_cast<int>(i % kPlanRows));
      }
    });
  } else {
    const int64_t rows = static_cast<int64_t>(p.seqlen_q) * p.num_q_heads;
    torch::stable::parallel_for(0, p.batch_size * rows, kMergeGrain, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) {
        cpu::merge_fixed(p, static_cast<int>(i / rows), static_cast<int>(i % rows));
      }
    });
  }
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(attnops, CPU, m) { m.impl("mla_decode", TORCH_BOX(&mla_decode_cpu)); }

}  // namespace attnops::mla_decode
