#pragma once
#include "mla_decode/sm90/combine.cuh"
#include "mla_decode/sm90/results.cuh"

namespace attnops::mla_decode::sm90 {

// The merge of results that lie as accumulators do (results.cuh). A unit is 16 rows of 16 * kVecs columns: of each
// split 16 bytes of each lane of a warp, kVecs times, and what those values weigh. A lane has all that it needs, so a
// warp waits for no other before its last instructions; kBatch splits of it are in flight at a time. What a merge takes
// is mostly its instructions, which run once, and it waits to be fetched: it is short before it is anything else.
template <typename T, int kVecs, int kBatch>
class UnitMerge {
 public:
  static constexpr int kUnitsPerRows = 2 * kPartialVecs / kVecs;  // of 16 rows
  static constexpr int kUnits = kPlanRows / 16 * kUnitsPerRows;

  // A lane's share of a unit: two rows, eight apart, of every vector two pairs of columns each. `sum` and the values
  // are relative to `maximum`.
  struct Total {
    float maximum[2], sum[2];
    float2 value[4 * kVecs];
  };

  struct Shared {
    float4 sums[kCombineWarps][32];  // maximum and sum of each row
    float2 values[kCombineWarps][4 * kVecs][32];
  };

  __device__ UnitMerge(const Params& p, int request, int block, const Splits& splits, bool aligned, Shared& shared)
      : UnitMerge(p, request, block * kPlanRows, min_of(p.seqlen_q * p.num_q_heads - block * kPlanRows, kPlanRows),
                  splits, aligned, shared) {}

  // Of any rows of a request.
  __device__ UnitMerge(const Params& p, int request, int first_row, int num_rows, const Splits& splits, bool aligned,
                       Shared& shared)
      : p_(p),
        request_(request),
        first_row_(first_row),
        num_rows_(num_rows),
        splits_(splits),
        count_(splits.overflow ? 0 : splits.count),
        aligned_(aligned),
        shared_(shared),
        warps_(warps_per_unit(splits.count)),
        warp_(threadIdx.x / 32),
        slice_(warp_ % warps_),
        lane_(threadIdx.x % 32) {}

  // Warps that share a unit: a function of the number of splits alone, so that a request's bits depend on nothing else.
  ATTNOPS_HOST_DEVICE static int warps_per_unit(int splits) {
    return splits <= 8 ? 1 : splits <= 16 ? 2 : splits <= 48 ? 4 : 8;
  }

  // Of rows that there are.
  __device__ int count_units() const { return ceil_div(num_rows_, 16) * kUnitsPerRows; }

  __device__ void run(int first, int count) const {
#pragma unroll 1
    for (int base = first; base < first + count; base += kCombineWarps / warps_) {
      const int number = base + warp_ / warps_, row = number / kUnitsPerRows * 16, unit = number % kUnitsPerRows;
      const bool valid = number < first + count && row < num_rows_;
      Total total = {{-INFINITY, -INFINITY}};
      if (valid) add_splits(row, unit, total);
      if (warps_ > 1) add_warps(total);
      if (valid && slice_ == 0) store(row, unit, total);
    }
  }

 private:
  static __device__ float reference_of(float maximum) { return maximum == -INFINITY ? 0.f : maximum; }

  // This warp's splits of a unit.
  __device__ void add_splits(int row, int unit, Total& total) const {
    const int vec = unit * kVecs, thread = 2 * row + lane_;
    const auto* values = reinterpret_cast<const uint4*>(p_.out_partial) + vec * kGroupThreads + thread;
    const auto* weights =
        reinterpret_cast<const float4*>(p_.out_partial) + kPartialWeights + vec / kPartialVecs * kGroupThreads + thread;
    constexpr int kSlotVecs = kPlanRows * kHeadDimV / 4;
#pragma unroll 1
    for (int first = slice_; first < count_; first += kBatch * warps_) {
      uint4 x[kBatch][kVecs];
      float4 weight[kBatch];
#pragma unroll
      for (int k = 0; k < kBatch; ++k) {
        const int i = first + k * warps_;
        weight[k] = {-INFINITY, -INFINITY, -INFINITY, -INFINITY};
        if (i >= count_) continue;
        const int64_t slot = splits_.slot(i) * kSlotVecs;
        weight[k] = __ldcg(weights + slot);
#pragma unroll
        for (int v = 0; v < kVecs; ++v) x[k][v] = __ldcg(values + slot + v * kGroupThreads);
      }
      const float before[2] = {total.maximum[0], total.maximum[1]};
#pragma unroll
      for (int k = 0; k < kBatch; ++k) {
        total.maximum[0] = fmaxf(total.maximum[0], weight[k].x);
        total.maximum[1] = fmaxf(total.maximum[1], weight[k].y);
      }
      const float reference[2] = {reference_of(total.maximum[0]), reference_of(total.maximum[1])};
      if (first != slice_) scale(total, __expf(before[0] - reference[0]), __expf(before[1] - reference[1]));
#pragma unroll
      for (int k = 0; k < kBatch; ++k) {
        total.sum[0] += __expf(weight[k].x - reference[0]);
        total.sum[1] += __expf(weight[k].y - reference[1]);
        if (first + k * warps_ >= count_) continue;
        add_values(x[k], __expf(weight[k].z - reference[0]), __expf(weight[k].w - reference[1]), total);
      }
    }
  }

  __device__ static void scale(Total& total, float upper, float lower) {
    total.sum[0] *= upper;
    total.sum[1] *= lower;
#pragma unroll
    for (int i = 0; i < 4 * kVecs; ++i) {
      total.value[i].x *= i % 2 == 0 ? upper : lower;
      total.value[i].y *= i % 2 == 0 ? upper : lower;
    }
  }

  __device__ static void add_values(const uint4 (&x)[kVecs], float upper, float lower, Total& total) {
#pragma unroll
    for (int v = 0; v < kVecs; ++v) {
      const uint32_t words[4] = {x[v].x, x[v].y, x[v].z, x[v].w};
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float2 pair = unpack_partial(words[i]);
        total.value[4 * v + i].x += (i % 2 == 0 ? upper : lower) * pair.x;
        total.value[4 * v + i].y += (i % 2 == 0 ? upper : lower) * pair.y;
      }
    }
  }

  // The totals of the warps that share a unit, into the first's.
  __device__ void add_warps(Total& total) const {
    shared_.sums[warp_][lane_] = {total.maximum[0], total.maximum[1], total.sum[0], total.sum[1]};
#pragma unroll
    for (int i = 0; i < 4 * kVecs; ++i) shared_.values[warp_][i][lane_] = total.value[i];
    __syncthreads();
#pragma unroll 1
    for (int other = warp_ + 1; slice_ == 0 && other < warp_ + warps_; ++other) {
      const float4 sums = shared_.sums[other][lane_];
      const float before[2] = {total.maximum[0], total.maximum[1]};
      total.maximum[0] = fmaxf(before[0], sums.x);
      total.maximum[1] = fmaxf(before[1], sums.y);
      const float reference[2] = {reference_of(total.maximum[0]), reference_of(total.maximum[1])};
      scale(total, __expf(before[0] - reference[0]), __expf(before[1] - reference[1]));
      const float factor[2] = {__expf(sums.x - reference[0]), __expf(sums.y - reference[1])};
      total.sum[0] += factor[0] * sums.z;
      total.sum[1] += factor[1] * sums.w;
#pragma unroll
      for (int i = 0; i < 4 * kVecs; ++i) {
        const float2 x = shared_.values[other][i][lane_];
        total.value[i].x += factor[i % 2] * x.x;
        total.value[i].y += factor[i % 2] * x.y;
      }
    }
    __syncthreads();
  }

  __device__ void store(int row, int unit, const Total& total) const {
    T* out[2];
    float factor[2];
    bool valid[2];
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int own = row + lane_ / 4 + 8 * h;
      valid[h] = own < num_rows_;
      const RowPlace at = row_place(p_, first_row_ + (valid[h] ? own : 0));
      const float sum = total.sum[h];
      const float lse = splits_.overflow ? NAN : sum == 0.f ? -INFINITY : total.maximum[h] + __logf(sum);
      factor[h] = splits_.overflow ? NAN : sum == 0.f ? 0.f : __fdividef(sink_factor(p_, at.head, lse), sum);
      out[h] = static_cast<T*>(p_.out) + request_ * p_.out_stride_request + at.token * p_.out_stride_token +
               at.head * p_.out_stride_head + unit * 16 * kVecs;
      if (p_.lse && valid[h] && unit == 0 && lane_ % 4 == 0) {
        p_.lse[(static_cast<int64_t>(request_) * p_.seqlen_q + at.token) * p_.num_q_heads + at.head] = lse;
      }
    }
    if constexpr (kVecs == 1) {
      store_pairs(out, valid, factor, total);
    } else {
      store_runs(out, valid, factor, total);
    }
  }

  // By pairs of columns: where it is used there is little to write.
  __device__ void store_pairs(T* const (&out)[2], const bool (&valid)[2], const float (&factor)[2],
                              const Total& total) const {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const uint32_t pair =
          attnops::sm90::pack_pair<T>(total.value[i].x * factor[i % 2], total.value[i].y * factor[i % 2]);
      T* const to = out[i % 2] + i / 2 * 8 + lane_ % 4 * 2;
      if (!valid[i % 2]) continue;
      if (aligned_) {
        *reinterpret_cast<uint32_t*>(to) = pair;
      } else {
        to[0] = reinterpret_cast<const T*>(&pair)[0];
        to[1] = reinterpret_cast<const T*>(&pair)[1];
      }
    }
  }

  // By runs of eight columns, which lanes of a quad exchange by way of shared memory.
  __device__ void store_runs(T* const (&out)[2], const bool (&valid)[2], const float (&factor)[2],
                             const Total& total) const {
    __shared__ __align__(128) uint8_t stages[kCombineWarps][kStageBytes];
    uint8_t* const base = stages[warp_];
    const uint32_t stage = attnops::sm90::smem_address(base);
#pragma unroll
    for (int c = 0; c < kVecs / 2; ++c) {
#pragma unroll
      for (int k = 0; k < 2; ++k) {
        uint32_t words[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const float2 pair = total.value[8 * c + 4 * k + i];
          words[i] = attnops::sm90::pack_pair<T>(pair.x * factor[i % 2], pair.y * factor[i % 2]);
        }
        attnops::sm90::store_fragment(words, stage + staged(lane_ % 16, 2 * k + lane_ / 16));
      }
      __syncwarp();
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const T* from = reinterpret_cast<const T*>(base + staged(lane_ / 4 + 8 * h, lane_ % 4));
        T* const to = out[h] + 32 * c + lane_ % 4 * 8;
        if (!valid[h]) continue;
        if (aligned_) {
          *reinterpret_cast<uint4*>(to) = *reinterpret_cast<const uint4*>(from);
        } else {
#pragma unroll 1
          for (int i = 0; i < 8; ++i) to[i] = from[i];
        }
      }
      __syncwarp();
    }
  }

  const Params& p_;
  const int request_, first_row_, num_rows_;
  const Splits& splits_;
  const int count_;  // of splits that are read
  const bool aligned_;
  Shared& shared_;
  const int warps_;         // that share a unit
  const int warp_, slice_;  // which of them this is
  const int lane_;
};

// Balanced plans. Grid: (parts, shares of a part). Where nothing is split, all that this costs is its launch.
template <typename T>
__global__ void __launch_bounds__(kCombineWarps * 32, 2)
    mla_merge_shares_kernel(const __grid_constant__ Params p, bool aligned) {
  using Merge = UnitMerge<T, 2, 4>;
  __shared__ typename Merge::Shared shared;
  const SplitKvEntry entry = entry_of(p, blockIdx.x);
  attnops::sm90::wait_for_prerequisites();
  each_shared_work(p, entry, [&](int work, const Splits& splits, int share, int shares) {
    const BlockPlace place = block_place(p, work);
    const Merge merge(p, place.request, place.block, splits, aligned, shared);
    const int units = merge.count_units(), first = units * share / shares;
    merge.run(first, units * (share + 1) / shares - first);
  });
}

// Pieces of short calls (Params::list_cuts), of blocks of kRows heads. Grid: (works, equal parts of a work's units).
template <typename T, int kRows>
__global__ void __launch_bounds__(kCombineWarps * 32, 2)
    mla_merge_short_units_kernel(const __grid_constant__ Params p, bool aligned) {
  using Merge = UnitMerge<T, 2, 4>;
  __shared__ typename Merge::Shared shared;
  attnops::sm90::launch_dependents();
  const int first = static_cast<int>(blockIdx.x) * p.list_cuts, parts = static_cast<int>(gridDim.y);
  const ShortPiece<kRows> at(p, first);
  attnops::sm90::wait_for_prerequisites();
  if (at.cuts <= 1) return;
  const Splits splits{at.cuts, first, first + 1, 1, false};
  const Merge merge(p, at.request, at.first_row, at.num_rows(p), splits, aligned, shared);
  const int units = merge.count_units(), part = static_cast<int>(blockIdx.y), begin = units * part / parts;
  merge.run(begin, units * (part + 1) / parts - begin);
}

// Batch-invariant plans. Grid: (requests, blocks of a request, equal parts of a block's units).
template <typename T, int kVecs, int kBatch>
__global__ void __launch_bounds__(kCombineWarps * 32, 2)
    mla_merge_units_kernel(const __grid_constant__ Params p, bool aligned) {
  const int request = static_cast<int>(blockIdx.x), block = static_cast<int>(blockIdx.y);
  const Splits splits = splits_of_cuts(p, request, block);
  attnops::sm90::wait_for_prerequisites();
  if (splits.count <= 1) return;
  if (splits.overflow && p.report && threadIdx.x == 0 && blockIdx.z == 0) {
    record_fault(p.report, {ReportOp::kMlaDecode, ReportKind::kLength, request, 0, splits.first + splits.count,
                            p.num_partials + 1});
  }
  using Merge = UnitMerge<T, kVecs, kBatch>;
  __shared__ typename Merge::Shared shared;
  const int units = Merge::kUnits / static_cast<int>(gridDim.z);
  Merge(p, request, block, splits, aligned, shared).run(static_cast<int>(blockIdx.z) * units, units);
}

}  // namespace attnops::mla_decode::sm90
