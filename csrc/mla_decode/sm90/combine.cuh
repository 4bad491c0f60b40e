#pragma once
#include <cmath>

#include "core/report.h"
#include "device/sm90/barrier.cuh"
#include "device/sm90/wgmma.cuh"
#include "mla_decode/sm90/pieces.cuh"

// What the merges of partial results of works that several parts share have in common. They are kernels of their own,
// as wide as there are rows and columns: at batch 1 a single merging CTA would take longer than the attention. They are
// programmatic dependents of the attention kernel, so that they find their splits while that one still runs.
namespace attnops::mla_decode::sm90 {

inline constexpr int kCombineWarps = 8;

// Splits of one work: the first at partial row `first`, the others at `second` + (i - 1) * step.
struct Splits {
  int count;
  int64_t first, second;
  int step;
  bool overflow;  // batch-invariant mode, more cuts than the caller has room for

  __device__ int64_t slot(int i) const { return i == 0 ? first : second + static_cast<int64_t>(i - 1) * step; }
};

// Of the rows of one block in batch-invariant mode.
__device__ inline Splits splits_of_cuts(const Params& p, int request, int block) {
  const int keys = p.selects ? keys_of<Options::kSelected>(p, request) : max_of(p.cache_seqlens[request], 0);
  const int tiles = tiles_of(p, keys).count;
  const int cuts = ceil_div(tiles, p.fixed_split_tokens / kPlanTileTokens);
  const int64_t first = first_cut(p, request, block, cuts);
  return {cuts, first, first + 1, 1, !has_room(p, first, cuts)};
}

// Balanced plans, by CTAs (part, share of the part): calls merge(work, splits, share, shares) for each work that this
// part shares with others. All that have its splits merge it together, an equal share each, so that a long merge takes
// as many SMs as its attention did. A part has at most two such works.
template <class Merge>
__device__ inline void each_shared_work(const Params& p, const SplitKvEntry& entry, const Merge& merge) {
  const int last_work = last_work_of(entry), blocks = p.division.blocks;
  if (last_work < entry.begin_work) return;  // idle, whatever the row says of splits
#pragma unroll 1
  for (int i = 0; i < 2; ++i) {
    const int work = i == 0 ? entry.begin_work : last_work;
    const int count = i == 0 ? entry.begin_num_splits : entry.last_num_splits;
    if (work > last_work || count <= 1 || (i == 1 && work == entry.begin_work)) continue;
    const int first_part = (i == 0 ? entry.first_part : group_of_part(p)) * blocks + block_in_work(p);
    const Splits splits{count, partial_slot(first_part, false), partial_slot(first_part + blocks, true), 2 * blocks,
                        false};
    const int of_part = static_cast<int>(gridDim.y), index = i == 0 ? entry.begin_split : 0;
    merge(work, splits, index * of_part + static_cast<int>(blockIdx.y), count * of_part);
  }
}

__device__ inline float warp_max(float x) {
#pragma unroll
  for (int offset = 16; offset > 0; offset /= 2) x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, offset));
  return x;
}

__device__ inline float warp_sum(float x) {
#pragma unroll
  for (int offset = 16; offset > 0; offset /= 2) x += __shfl_xor_sync(0xffffffffu, x, offset);
  return x;
}

// The maximum of a row's lse, or zero when it has none, and the sum of exponentials under it.
struct RowTotal {
  float reference, sum;
};

}  // namespace attnops::mla_decode::sm90
