#include <torch/csrc/stable/library.h>

#include "torch_bindings/stream.h"
#include "xqa_decode/cuda/plan.h"
#include "xqa_decode/impls.h"
#include "xqa_decode/op.h"

namespace attnops::xqa_decode {
namespace {

// Of more rows, works of so many tiles stay whole: a merge of many rows, and a second piece, take as long. And a work
// costs as much as two tiles besides its own: its queries, its end.
constexpr int kManyRows = 64, kShortTilesOfMany = 8;
constexpr int kOverheadOfMany = 2 * static_cast<int>(kTileCost);

// A tile of few e4m3 rows takes as long to convert as its bytes take to come. So nothing hides what a work costs
// besides, some three tiles. What stays whole is decided as over 16 bits: by how long a merge takes.
constexpr int kFewRows = 16, kOverheadOfBytes = 3 * static_cast<int>(kTileCost);

SplitKvGeometry geometry_of_rows(SplitKvGeometry geometry, int64_t rows, int64_t kv_bytes) {
  const bool balanced = geometry.fixed_split_tiles == 0;
  if (rows <= kFewRows && kv_bytes == 1 && balanced) {
    geometry.whole_overhead = geometry.work_overhead;
    geometry.work_overhead = kOverheadOfBytes;
  }
  if (rows <= kManyRows) return geometry;
  geometry.short_tiles = kShortTilesOfMany;
  if (balanced) geometry.work_overhead = kOverheadOfMany;
  return geometry;
}

void xqa_decode_plan_cuda(const Tensor& tile_scheduler_metadata, const Tensor& num_splits, const Tensor& cache_seqlens,
                          int64_t seqlen_q, int64_t num_kv_heads, int64_t window_left, int64_t fixed_split_tokens,
                          int64_t rows, int64_t kv_bytes) {
  const PlanParams plan = checked_plan_params(tile_scheduler_metadata, num_splits, cache_seqlens, seqlen_q,
                                              num_kv_heads, window_left, fixed_split_tokens, rows, kv_bytes);
  const SplitKvGeometry geometry = geometry_of_rows(gpu_plan_geometry(plan.geometry), rows, kv_bytes);
  const OnDevice guard(cache_seqlens);
  launch_plan(geometry, plan.tensors.cache_seqlens, plan.tensors.tile_scheduler_metadata, plan.tensors.num_splits,
              current_stream(cache_seqlens));
}

void run_cuda(const Params& params, const Tensor& q) {
  if (params.ragged && params.num_tokens == 0) return;
  const OnDevice guard(q);
  select_launch(params)(params, current_stream(q));
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(attnops, CUDA, m) {
  m.impl("xqa_decode_plan", TORCH_BOX(&xqa_decode_plan_cuda));
  m.impl("xqa_decode", TORCH_BOX(&xqa_decode<&run_cuda>));
}

}  // namespace attnops::xqa_decode
