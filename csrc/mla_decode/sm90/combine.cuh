#pragma once
#include <cmath>

#include "core/report.h"
#include "device/sm90/barrier.cuh"
#include "device/sm90/wgmma.cuh"
#include "mla_decode/sm90/pieces.cuh"

// Merges the partial results of works that several parts share. A kernel of its own, as wide as there are rows and
// columns: at batch 1 a single merging CTA would take longer than the attention. It is launched as a programmatic
// dependent of the attention kernel, so that it finds its splits while that one still runs.
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

// Warps that share a row: a function of the number of splits alone, so that a request's bits depend on nothing else.
__device__ inline int warps_per_row(int splits) { return splits <= 4 ? 1 : splits <= 8 ? 2 : splits <= 16 ? 4 : 8; }

// The row of one work that a warp merges.
struct SplitRow {
  const float* lses;  // of split 0's slot 0
  const float* outs;  // at this lane's first column
  Splits splits;

  __device__ float lse(int i) const { return i < splits.count ? __ldcg(lses + splits.slot(i) * kPlanRows) : -INFINITY; }
};

// Some splits of a row, all their loads in flight at once: every dependent load costs most of a microsecond.
template <int kVecs, int kCount>
struct SplitBatch {
  float lse[kCount];
  float4 x[kCount][kVecs];

  // Splits first, first + step, ...; those beyond the last weigh nothing.
  __device__ void load(const SplitRow& row, int first, int step) {
#pragma unroll
    for (int k = 0; k < kCount; ++k) {
      const int i = first + k * step;
      lse[k] = row.lse(i);
      if (i >= row.splits.count) continue;
      const float4* out = reinterpret_cast<const float4*>(row.outs + row.splits.slot(i) * (kPlanRows * kHeadDimV));
#pragma unroll
      for (int v = 0; v < kVecs; ++v) x[k][v] = __ldcg(out + v * 32);
    }
  }

  __device__ void add_to(float4 (&total)[kVecs], float reference) const {
#pragma unroll
    for (int k = 0; k < kCount; ++k) {
      if (lse[k] == -INFINITY) continue;  // nothing was loaded, or an empty split's row
      const float weight = expf(lse[k] - reference);
#pragma unroll
      for (int v = 0; v < kVecs; ++v) {
        total[v].x += weight * x[k][v].x;
        total[v].y += weight * x[k][v].y;
        total[v].z += weight * x[k][v].z;
        total[v].w += weight * x[k][v].w;
      }
    }
  }
};

// The maximum of a row's lse, or zero when it has none, and the sum of exponentials under it.
struct RowTotal {
  float reference, sum;
};

__device__ inline RowTotal total_of(const SplitRow& row) {
  constexpr int kHeld = 5;  // per lane: enough for a part per SM
  const int lane = threadIdx.x % 32;
  float held[kHeld], lse_max = -INFINITY, sum = 0.f;
#pragma unroll
  for (int k = 0; k < kHeld; ++k) held[k] = row.lse(lane + 32 * k);
#pragma unroll
  for (int k = 0; k < kHeld; ++k) lse_max = fmaxf(lse_max, held[k]);
  for (int i = lane + 32 * kHeld; i < row.splits.count; i += 32) lse_max = fmaxf(lse_max, row.lse(i));
  lse_max = warp_max(lse_max);
  const float reference = lse_max == -INFINITY ? 0.f : lse_max;
#pragma unroll
  for (int k = 0; k < kHeld; ++k) sum += expf(held[k] - reference);
  for (int i = lane + 32 * kHeld; i < row.splits.count; i += 32) sum += expf(row.lse(i) - reference);
  return {reference, warp_sum(sum)};
}

// Grid: (blocks of all requests, groups of their rows, kColumnBlocks). A warp takes every so many splits of a row, 16
// bytes a lane.
template <typename T, int kColumnBlocks>
__global__ void __launch_bounds__(kCombineWarps * 32, kColumnBlocks == 1 ? 3 : 2)
    mla_combine_kernel(const __grid_constant__ Params p, int rows_per_block, bool aligned) {
  constexpr int kVecs = 4 / kColumnBlocks, kBatch = 8 / kVecs;
  __shared__ float4 shared_sums[kCombineWarps][kVecs][32];
  const int blocks = blocks_of_request(p), request = blockIdx.x / blocks, block = blockIdx.x % blocks;
  const int first_row = block * kPlanRows;
  const int num_rows = min_of(p.seqlen_q * p.num_q_heads - first_row, kPlanRows);
  const Splits splits = find_splits(p, request, block);
  attnops::sm90::wait_for_prerequisites();
  if (splits.count <= 1) return;
  if (splits.overflow && p.report && threadIdx.x == 0 && blockIdx.y == 0 && blockIdx.z == 0) {
    record_fault(p.report, {ReportOp::kMlaDecode, ReportKind::kLength, request, 0, splits.first + splits.count,
                            p.num_partials + 1});
  }

  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, column = blockIdx.z * (kVecs * 128) + lane * 4;
  const int warps = warps_per_row(splits.count), slice = warp % warps;
  const int end_row = min_of((static_cast<int>(blockIdx.y) + 1) * rows_per_block, num_rows);
  for (int base = blockIdx.y * rows_per_block; base < end_row; base += kCombineWarps / warps) {
    const int row = base + warp / warps;
    const bool valid = row < end_row;
    RowTotal all{0.f, 0.f};
    float4 total[kVecs] = {};
    if (valid && !splits.overflow) {
      const SplitRow source{p.lse_partial + row, p.out_partial + static_cast<int64_t>(row) * kHeadDimV + column,
                            splits};
      SplitBatch<kVecs, kBatch> batch;
      batch.load(source, slice, warps);
      all = total_of(source);
      batch.add_to(total, all.reference);
      for (int i = slice + kBatch * warps; i < splits.count; i += kBatch * warps) {
        batch.load(source, i, warps);
        batch.add_to(total, all.reference);
      }
    }
    if (warps > 1) {
#pragma unroll
      for (int v = 0; v < kVecs; ++v) shared_sums[warp][v][lane] = total[v];
      __syncthreads();
      for (int other = 1; slice == 0 && other < warps; ++other) {
#pragma unroll
        for (int v = 0; v < kVecs; ++v) {
          const float4 x = shared_sums[warp + other][v][lane];
          total[v].x += x.x;
          total[v].y += x.y;
          total[v].z += x.z;
          total[v].w += x.w;
        }
      }
      __syncthreads();
    }
    if (!valid || slice != 0) continue;
    const RowPlace at = row_place(p, first_row + row);
    const float lse = splits.overflow ? NAN : all.sum == 0.f ? -INFINITY : all.reference + logf(all.sum);
    const float factor = splits.overflow ? NAN : all.sum == 0.f ? 0.f : sink_factor(p, at.head, lse) / all.sum;
    T* out = static_cast<T*>(p.out) + request * p.out_stride_request + at.token * p.out_stride_token +
             at.head * p.out_stride_head + column;
#pragma unroll
    for (int v = 0; v < kVecs; ++v) {
      const uint2 pairs = {attnops::sm90::pack_pair<T>(total[v].x * factor, total[v].y * factor),
                           attnops::sm90::pack_pair<T>(total[v].z * factor, total[v].w * factor)};
      if (aligned) {
        *reinterpret_cast<uint2*>(out + v * 128) = pairs;
      } else {
#pragma unroll
        for (int i = 0; i < 4; ++i) out[v * 128 + i] = reinterpret_cast<const T*>(&pairs)[i];
      }
    }
    if (p.lse && lane == 0 && blockIdx.z == 0) {
      p.lse[(static_cast<int64_t>(request) * p.seqlen_q + at.token) * p.num_q_heads + at.head] = lse;
    }
  }
}

}  // namespace attnops::mla_decode::sm90
