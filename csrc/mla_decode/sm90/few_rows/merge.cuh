#pragma once
#include <cmath>

#include "mla_decode/sm90/combine.cuh"
#include "mla_decode/sm90/few_rows/layout.h"

// Merges the partial results of requests that several parts share, of kernels that write them as rows
// (sm90/fp8_fragments). It fits beside the attention kernel's CTAs, so that it is resident and knows its splits by the
// time those end; what is left then is two rounds of loads.
//
// The order of summation is a function of the number of splits alone, so that a request's bits depend on nothing else:
// `merging_warps` share a row, warp w of them adds splits w, w + 2 warps, .. and w + warps, w + 3 warps, .. apart.
namespace attnops::mla_decode::sm90::few_rows {

inline constexpr int kMergeThreads = 256;
inline constexpr int kMergeWarps = kMergeThreads / 32;

ATTNOPS_HOST_DEVICE inline int merging_warps(int splits) {
  return splits <= 4 ? 1 : splits <= 8 ? 2 : splits <= 16 ? 4 : 8;
}

__device__ inline void add_weighted(float4& total, float weight, const float4& x) {
  total.x += weight * x.x;
  total.y += weight * x.y;
  total.z += weight * x.z;
  total.w += weight * x.w;
}

// The splits of the rows of a CTA, with what can be staged of their lse in shared memory.
struct MergeRows {
  static constexpr int kRows = kMergeWarps, kStaged = 160;  // more than a part per SM
  const Params& p;
  const Splits& splits;
  float (*staged)[kStaged];
  int first_row, num_rows;

  __device__ const float* lse_place(int row, int i) const {
    return p.lse_partial + splits.slot(i) * kPlanRows + first_row + row;
  }

  __device__ void stage() const {
    const int count = min_of(splits.count, kStaged);
    for (int i = threadIdx.x; i < num_rows * count; i += kMergeThreads) {
      const int row = i / count, split = i % count;
      staged[row][split] = __ldcg(lse_place(row, split));
    }
  }

  __device__ float lse(int row, int i) const { return i < kStaged ? staged[row][i] : __ldcg(lse_place(row, i)); }

  // The maximum of a row's lse, or zero when it has none, and the sum of exponentials under it.
  __device__ RowTotal total(int row) const {
    float lse_max = -INFINITY, sum = 0.f;
    for (int i = threadIdx.x % 32; i < splits.count; i += 32) lse_max = fmaxf(lse_max, lse(row, i));
    lse_max = warp_max(lse_max);
    const float reference = lse_max == -INFINITY ? 0.f : lse_max;
    for (int i = threadIdx.x % 32; i < splits.count; i += 32) sum += expf(lse(row, i) - reference);
    return {reference, warp_sum(sum)};
  }
};

// Every `step`-th split from `first` on of a row's columns: kVecs vectors of four, 128 columns apart, for a lane.
template <int kVecs, int kBatch>
struct Chain {
  const MergeRows& rows;
  int row, column, first, step;
  float4 x[kBatch][kVecs];
  float4 total[kVecs] = {};

  // Some splits at once: every dependent load costs most of a microsecond.
  __device__ void load(int begin) {
#pragma unroll
    for (int k = 0; k < kBatch; ++k) {
      const int i = first + (begin + k) * step;
      if (i >= rows.splits.count) continue;
      const int64_t partial_row = rows.splits.slot(i) * kPlanRows + rows.first_row + row;
      const float4* out = reinterpret_cast<const float4*>(rows.p.out_partial + partial_row * kHeadDimV + column);
#pragma unroll
      for (int v = 0; v < kVecs; ++v) x[k][v] = __ldcg(out + v * 32);
    }
  }

  __device__ void add(int begin, float reference) {
#pragma unroll
    for (int k = 0; k < kBatch; ++k) {
      const int i = first + (begin + k) * step;
      const float lse = i < rows.splits.count ? rows.lse(row, i) : -INFINITY;
      if (lse == -INFINITY) continue;  // nothing was loaded, or an empty split's row
      const float weight = expf(lse - reference);
#pragma unroll
      for (int v = 0; v < kVecs; ++v) add_weighted(total[v], weight, x[k][v]);
    }
  }
};

template <typename T, int kVecs>
__device__ inline void write_row(const Params& p, int request, int row, int column, const RowTotal& all, bool overflow,
                                 bool aligned, const float4 (&total)[kVecs]) {
  const RowPlace at = row_place(p, row);
  const float lse = overflow ? NAN : all.sum == 0.f ? -INFINITY : all.reference + logf(all.sum);
  const float factor = overflow ? NAN : all.sum == 0.f ? 0.f : sink_factor(p, at.head, lse) / all.sum;
  T* out = static_cast<T*>(p.out) + request * p.out_stride_request + at.token * p.out_stride_token +
           at.head * p.out_stride_head + column;
#pragma unroll
  for (int v = 0; v < kVecs; ++v) {
    const uint32_t pairs[2] = {attnops::sm90::pack_pair<T>(total[v].x * factor, total[v].y * factor),
                               attnops::sm90::pack_pair<T>(total[v].z * factor, total[v].w * factor)};
    if (aligned) {
      *reinterpret_cast<uint2*>(out + v * 128) = {pairs[0], pairs[1]};
    } else {
#pragma unroll
      for (int i = 0; i < 4; ++i) out[v * 128 + i] = reinterpret_cast<const T*>(pairs)[i];
    }
  }
  if (p.lse && column == 0) {
    p.lse[(static_cast<int64_t>(request) * p.seqlen_q + at.token) * p.num_q_heads + at.head] = lse;
  }
}

// What a merging CTA keeps in shared memory. Wide: one row and 64 columns per CTA, half a warp per chain. Not wide: up
// to eight rows and all columns, a warp for two chains.
template <bool kWide>
struct MergeShared {
  static constexpr int kVecs = kWide ? 1 : 4, kLanes = kWide ? 16 : 32;
  float4 sums[kMergeWarps][kVecs][kLanes];
  float staged[kWide ? 1 : MergeRows::kRows][MergeRows::kStaged];
};

// Merges rows [first_row, first_row + num_rows) of a request, or of a block that begins at row `block_row` of it.
template <typename T, bool kWide>
__device__ inline void merge_rows(const Params& p, int request, const Splits& splits, int first_row, int num_rows,
                                  int block_of_columns, bool aligned, MergeShared<kWide>& shared, int block_row = 0) {
  constexpr int kVecs = MergeShared<kWide>::kVecs, kLanes = MergeShared<kWide>::kLanes, kBatch = kWide ? 8 : 1;
  using Part = Chain<kVecs, kBatch>;
  auto& shared_sums = shared.sums;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, column = (block_of_columns * kLanes + lane % kLanes) * 4;
  const int warps = merging_warps(splits.count), slice = warp % warps;
  const MergeRows rows{p, splits, shared.staged, first_row, num_rows};
  const int splits_here = splits.overflow ? 0 : splits.count;
  if (splits_here > 0) rows.stage();
  for (int base = 0; base < rows.num_rows; base += kMergeWarps / warps) {
    const int row = base + warp / warps;
    const bool valid = row < rows.num_rows, merges = valid && !splits.overflow;
    Part mine{rows, row, column, slice + (kWide && lane >= kLanes ? warps : 0), 2 * warps};
    Part other{rows, row, column, slice + warps, 2 * warps};
    if (merges) {
      mine.load(0);
      if constexpr (!kWide) other.load(0);
    }
    if (base == 0) __syncthreads();  // what is staged
    RowTotal all{0.f, 0.f};
    if (merges) {
      all = rows.total(row);
      for (int i = 0;;) {
        mine.add(i, all.reference);
        if constexpr (!kWide) other.add(i, all.reference);
        i += kBatch;
        if (slice + i * 2 * warps >= splits.count) break;
        mine.load(i);
        if constexpr (!kWide) other.load(i);
      }
    }
    auto& total = mine.total;
#pragma unroll
    for (int v = 0; v < kVecs; ++v) {
      if constexpr (kWide) {
        other.total[v] = {__shfl_xor_sync(0xffffffffu, total[v].x, 16), __shfl_xor_sync(0xffffffffu, total[v].y, 16),
                          __shfl_xor_sync(0xffffffffu, total[v].z, 16), __shfl_xor_sync(0xffffffffu, total[v].w, 16)};
      }
      add_weighted(total[v], 1.f, other.total[v]);
    }
    if (warps > 1) {
#pragma unroll
      for (int v = 0; v < kVecs; ++v) shared_sums[warp][v][lane % kLanes] = total[v];
      __syncthreads();
      for (int i = 1; slice == 0 && i < warps; ++i) {
#pragma unroll
        for (int v = 0; v < kVecs; ++v) add_weighted(total[v], 1.f, shared_sums[warp + i][v][lane % kLanes]);
      }
      __syncthreads();
    }
    if (valid && slice == 0 && lane < kLanes) {
      write_row<T>(p, request, block_row + first_row + row, column, all, splits.overflow, aligned, total);
    }
  }
}

// Balanced plans. Grid: (parts, shares of a part): the parts that have the splits of a request merge it together
// (merge_units.cuh), an equal share of its rows each; or, where rows are few for so many, of blocks of their columns.
template <typename T>
__global__ void __maxnreg__(96) mla_merge_shared_rows_kernel(const __grid_constant__ Params p, bool aligned) {
  using Wide = MergeShared<true>;
  __shared__ union {
    MergeShared<false> rows;
    Wide columns;
  } shared;
  attnops::sm90::launch_dependents();
  const SplitKvEntry entry = entry_of(p, blockIdx.x);
  attnops::sm90::wait_for_prerequisites();
  const int num_rows = p.seqlen_q * p.num_q_heads;
  each_shared_work(p, entry, [&](int work, const Splits& splits, int share, int shares) {
    const bool wide = shares > 2 * num_rows;
    constexpr int kBlocks = kHeadDimV / (4 * Wide::kLanes);  // of columns
    const int units = wide ? num_rows * kBlocks : num_rows, end = units * (share + 1) / shares;
#pragma unroll 1
    for (int unit = units * share / shares; unit < end; unit += wide ? 1 : MergeRows::kRows) {
      if (wide) {
        merge_rows<T, true>(p, work, splits, unit / kBlocks, 1, unit % kBlocks, aligned, shared.columns);
      } else {
        merge_rows<T, false>(p, work, splits, unit, min_of(end - unit, MergeRows::kRows), 0, aligned, shared.rows);
      }
      __syncthreads();  // what is staged has been read
    }
  });
}

// Batch-invariant plans. Grid: (requests, blocks of rows, blocks of columns).
template <typename T, bool kWide>
__global__ void __maxnreg__(88) mla_merge_kernel(const __grid_constant__ Params p, int rows_per_block, bool aligned) {
  __shared__ MergeShared<kWide> shared;
  attnops::sm90::launch_dependents();
  const int request = blockIdx.x, first_row = blockIdx.y * rows_per_block;
  const Splits splits = splits_of_cuts(p, request, 0);
  attnops::sm90::wait_for_prerequisites();
  if (splits.count <= 1) return;
  if (splits.overflow && p.report && threadIdx.x == 0 && blockIdx.y == 0 && blockIdx.z == 0) {
    record_fault(p.report, {ReportOp::kMlaDecode, ReportKind::kLength, request, 0, splits.first + splits.count,
                            p.num_partials + 1});
  }
  merge_rows<T, kWide>(p, request, splits, first_row, min_of(p.seqlen_q * p.num_q_heads - first_row, rows_per_block),
                       blockIdx.z, aligned, shared);
}

// Pieces of short calls (Params::list_cuts). Grid: (works, blocks of rows, blocks of columns).
template <typename T, bool kWide>
__global__ void __maxnreg__(88)
    mla_merge_short_kernel(const __grid_constant__ Params p, int rows_per_block, bool aligned) {
  __shared__ MergeShared<kWide> shared;
  attnops::sm90::launch_dependents();
  const int first = blockIdx.x * p.list_cuts, first_row = blockIdx.y * rows_per_block;
  const ShortPiece<kShortRows> at(p, first);
  const int num_rows = min_of(at.num_rows(p) - first_row, rows_per_block);
  attnops::sm90::wait_for_prerequisites();
  if (at.cuts <= 1 || num_rows <= 0) return;
  const Splits splits{at.cuts, first, first + 1, 1, false};
  merge_rows<T, kWide>(p, at.request, splits, first_row, num_rows, blockIdx.z, aligned, shared, at.first_row);
}

}  // namespace attnops::mla_decode::sm90::few_rows
