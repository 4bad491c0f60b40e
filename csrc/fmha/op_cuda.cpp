#include <torch/csrc/stable/library.h>

#include "fmha/checks.h"
#include "fmha/cuda/plan.h"
#include "torch_bindings/stream.h"

namespace attnops::fmha {
namespace {

void fmha_plan_cuda(const Tensor& tile_order, const Tensor& cu_seqlens_q, const OptionalTensor& cu_seqlens_k,
                    const OptionalTensor& cache_seqlens, int64_t tile_q, bool causal, int64_t window_left) {
  const PlanParams p =
      checked_plan_params(tile_order, cu_seqlens_q, cu_seqlens_k, cache_seqlens, tile_q, causal, window_left);
  const OnDevice guard(cu_seqlens_q);
  launch_plan({.geometry = p.geometry,
               .cu_seqlens_q = p.cu_seqlens_q,
               .cu_seqlens_k = p.cu_seqlens_k,
               .cache_seqlens = p.cache_seqlens,
               .tile_order = p.tile_order,
               .max_tiles = static_cast<int>(p.max_tiles)},
              current_stream(cu_seqlens_q));
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(attnops, CUDA, m) { m.impl("fmha_plan", TORCH_BOX(&fmha_plan_cuda)); }

}  // namespace attnops::fmha
