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

// Of the rows of one block. Every thread of the CTA gets the same answer.
__device__ inline Splits find_splits(const Params& p, int request, int block) {
  if (p.fixed_split_tokens > 0) {
    const int tiles = tiles_of(p, max_of(p.cache_seqlens[request], 0)).count;
    const int cuts = ceil_div(tiles, p.fixed_split_tokens / kPlanTileTokens);
    const int64_t first = first_cut(p, request, block, cuts);
    return {cuts, first, first + 1, 1, first + cuts > p.num_partials};
  }
  const int blocks = blocks_of_work(p), work = (request * blocks_of_request(p) + block) / blocks;
  __shared__ int count, first_slot, second_slot;
  if (threadIdx.x == 0) count = 0;
  __syncthreads();
#pragma unroll 1
  for (int part = block % blocks + threadIdx.x * blocks; part < p.num_sm_parts; part += kCombineWarps * 32 * blocks) {
    const SplitKvEntry entry = entry_of(p, part);
    const int last_work = last_work_of(entry);
    if (last_work != work || last_work < entry.begin_work || entry.last_num_splits <= 1) continue;
    const bool only_one = last_work == entry.begin_work;
    if (only_one && entry.begin_split != 0) continue;  // the work began in an earlier part
    count = entry.last_num_splits;
    first_slot = partial_slot(part, only_one);
    second_slot = partial_slot(part + blocks, true);
  }
  __syncthreads();
  return {count, first_slot, second_slot, 2 * blocks, false};
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
