#include <torch/csrc/stable/library.h>

#include "fmha/cuda/plan.h"
#include "fmha/impls.h"
#include "fmha/op.h"
#include "torch_bindings/stream.h"

namespace attnops::fmha {
namespace {

void fmha_plan_cuda(const Tensor& tile_order, const Tensor& cu_seqlens_q, const OptionalTensor& cu_seqlens_k,
                    const OptionalTensor& cache_seqlens, int64_t tile_q, bool causal, int64_t window_left,
                    const OptionalTensor& pieces, int64_t works_per_tile, int64_t num_sms, bool cut_in_part) {
  const PlanParams p = checked_plan_params(tile_order, cu_seqlens_q, cu_seqlens_k, cache_seqlens, tile_q, causal,
                                           window_left, pieces, works_per_tile, num_sms, cut_in_part);
  const OnDevice guard(cu_seqlens_q);
  launch_plan({.geometry = p.geometry,
               .cu_seqlens_q = p.cu_seqlens_q,
               .cu_seqlens_k = p.cu_seqlens_k,
               .cache_seqlens = p.cache_seqlens,
               .tile_order = p.tile_order,
               .max_tiles = static_cast<int>(p.max_tiles),
               .pieces = p.pieces,
               .max_pieces = p.max_pieces,
               .works_per_tile = p.works_per_tile,
               .num_sms = p.num_sms,
               .cut_in_part = p.cut_in_part},
              current_stream(cu_seqlens_q));
}

void run_cuda(const char* op, const Params& params, const Tensor& q) {
  const OnDevice guard(q);
  launch(op, params, current_stream(q));
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(attnops, CUDA, m) {
  m.impl("fmha_plan", TORCH_BOX(&fmha_plan_cuda));
  m.impl("fmha_varlen", TORCH_BOX(&fmha_varlen<&run_cuda>));
  m.impl("fmha_paged", TORCH_BOX(&fmha_paged<&run_cuda>));
}

}  // namespace attnops::fmha
