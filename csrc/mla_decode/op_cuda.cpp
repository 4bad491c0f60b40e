#include <torch/csrc/stable/library.h>

#include "mla_decode/cuda/plan.h"
#include "mla_decode/impls.h"
#include "mla_decode/op.h"
#include "torch_bindings/stream.h"

namespace attnops::mla_decode {
namespace {

void mla_decode_plan_cuda(const Tensor& tile_scheduler_metadata, const Tensor& num_splits, const Tensor& cache_seqlens,
                          int64_t seqlen_q, int64_t num_q_heads, int64_t window_left, int64_t fixed_split_tokens) {
  PlanParams plan = checked_plan_params(tile_scheduler_metadata, num_splits, cache_seqlens, seqlen_q, num_q_heads,
                                        window_left, fixed_split_tokens);
  if (seqlen_q * num_q_heads > kMergedRows) plan.geometry.whole_tiles = kWholeTiles;
  const OnDevice guard(cache_seqlens);
  launch_plan(plan.geometry, plan.tensors.cache_seqlens, plan.tensors.tile_scheduler_metadata, plan.tensors.num_splits,
              current_stream(cache_seqlens));
}

void run_cuda(const Params& params, const Tensor& q) {
  const OnDevice guard(q);
  select_launch(params)(params, current_stream(q));
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(attnops, CUDA, m) {
  m.impl("mla_decode_plan", TORCH_BOX(&mla_decode_plan_cuda));
  m.impl("mla_decode", TORCH_BOX(&mla_decode<&run_cuda>));
}

}  // namespace attnops::mla_decode
