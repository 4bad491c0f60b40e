#pragma once
#include "mla_decode/sm90/combine.cuh"
#include "mla_decode/sm90/results.cuh"

namespace attnops::mla_decode::sm90 {

// The merge of results that lie as accumulators do (results.cuh). A unit is 16 rows of 16 or 32 columns: 16 bytes of
// each lane of a warp, once or twice.
inline constexpr int kVecsPerRows = 2 * kPartialVecs;  // of 16 rows

// Sums of exponentials of 16 rows, of all their splits.
struct UnitTotals {
  float maximum[kCombineWarps][16], sum[kCombineWarps][16];
};

__device__ inline void write_totals(const float* lses, const Splits& splits, int count, UnitTotals& totals) {
  const int row = threadIdx.x % 16, lane = threadIdx.x % 32;
  float maximum = -INFINITY, sum = 0.f;
  for (int i = threadIdx.x / 16; i < count; i += kCombineWarps * 2) {
    const float x = __ldcg(lses + splits.slot(i) * kPlanRows + row);
    const float after = fmaxf(maximum, x);
    if (after != -INFINITY) sum = sum * __expf(maximum - after) + __expf(x - after);
    maximum = after;
  }
  const float other_maximum = __shfl_xor_sync(0xffffffffu, maximum, 16);
  const float other_sum = __shfl_xor_sync(0xffffffffu, sum, 16);
  const float all = fmaxf(maximum, other_maximum), reference = all == -INFINITY ? 0.f : all;
  if (lane < 16) {
    totals.maximum[threadIdx.x / 32][row] = all;
    totals.sum[threadIdx.x / 32][row] =
        sum * __expf(maximum - reference) + other_sum * __expf(other_maximum - reference);
  }
}

// The natural log of a row's sum.
__device__ inline float read_total(const UnitTotals& totals, int row) {
  float maximum = -INFINITY, sum = 0.f;
#pragma unroll
  for (int w = 0; w < kCombineWarps; ++w) maximum = fmaxf(maximum, totals.maximum[w][row]);
  if (maximum == -INFINITY) return -INFINITY;
#pragma unroll
  for (int w = 0; w < kCombineWarps; ++w) sum += totals.sum[w][row] * __expf(totals.maximum[w][row] - maximum);
  return maximum + logf(sum);
}

// Warps that share a unit: a function of the number of splits alone, so that a request's bits depend on nothing else.
__device__ inline int warps_per_unit(int splits) { return splits <= 8 ? 1 : splits <= 16 ? 2 : splits <= 48 ? 4 : 8; }

// Two values of 16 bits.
__device__ inline float2 unpack_partial(uint32_t word) {
  return __half22float2(reinterpret_cast<const __half2&>(word));
}

// Units of a block that one CTA merges, all of the same 16 rows or of whole groups of rows.
struct UnitRange {
  int first, count;
};

// A lane's share of a unit: pairs of columns, by eight columns and then by row.
template <int kUnitVecs>
struct UnitSum {
  float2 value[4 * kUnitVecs];
};

template <typename T, int kUnitVecs>
class UnitMerge {
 public:
  __device__ UnitMerge(const Params& p, int request, int block, const Splits& splits, bool aligned)
      : p_(p),
        request_(request),
        first_row_(block * kPlanRows),
        num_rows_(min_of(p.seqlen_q * p.num_q_heads - first_row_, kPlanRows)),
        splits_(splits),
        count_(splits.overflow ? 0 : splits.count),
        aligned_(aligned),
        warps_(warps_per_unit(splits.count)),
        slice_(threadIdx.x / 32 % warps_),
        lane_(threadIdx.x % 32) {}

  // Units of rows [row, row + 16).
  __device__ void run(int row, UnitRange units) {
    __shared__ UnitTotals totals;
    if (row >= num_rows_) return;
    __syncthreads();
    write_totals(p_.lse_partial + row, splits_, count_, totals);
    const int warp = threadIdx.x / 32;
    for (int base = 0; base < units.count; base += kCombineWarps / warps_) {
      const int number = base + warp / warps_;
      const bool valid = number < units.count;
      UnitSum<kUnitVecs> total = {};
      float lse[2];
      add_splits(row, units.first + number, valid, base == 0, totals, lse, total);
      if (warps_ > 1) add_warps(total);
      if (valid && slice_ == 0) store(row, units.first + number, lse, total);
    }
  }

 private:
  static constexpr int kBatch = 8 / kUnitVecs;

  // This warp's splits of a unit, kBatch of them in flight at a time; and the rows' lse.
  __device__ void add_splits(int row, int unit, bool valid, bool is_first, const UnitTotals& totals, float (&all)[2],
                             UnitSum<kUnitVecs>& total) const {
    const int group = unit * kUnitVecs / kPartialVecs, thread = 2 * row + lane_;
    const auto* values = reinterpret_cast<const uint4*>(p_.out_partial) + unit * kUnitVecs * kGroupThreads + thread;
    const auto* weights =
        reinterpret_cast<const float2*>(reinterpret_cast<const uint4*>(p_.out_partial) + kPartialWeights) +
        group * kGroupThreads + thread;
    constexpr int kSlotBytes = kPlanRows * kHeadDimV * 4;
    for (int first = slice_; first < count_ || first == slice_; first += kBatch * warps_) {
      uint4 x[kBatch][kUnitVecs];
      float2 weight[kBatch];
#pragma unroll
      for (int k = 0; k < kBatch; ++k) {
        const int i = first + k * warps_;
        weight[k] = {-INFINITY, -INFINITY};
        if (!valid || i >= count_) continue;
        const int64_t slot = splits_.slot(i);
        weight[k] = __ldcg(weights + slot * (kSlotBytes / 8));
#pragma unroll
        for (int v = 0; v < kUnitVecs; ++v) x[k][v] = __ldcg(values + slot * (kSlotBytes / 16) + v * kGroupThreads);
      }
      if (first == slice_) {
        if (is_first) __syncthreads();
#pragma unroll
        for (int h = 0; h < 2; ++h) all[h] = read_total(totals, lane_ / 4 + 8 * h);
      }
#pragma unroll
      for (int k = 0; k < kBatch; ++k) {
        if (!valid || first + k * warps_ >= count_) continue;
        const float w[2] = {weight[k].x == -INFINITY ? 0.f : __expf(weight[k].x - all[0]),
                            weight[k].y == -INFINITY ? 0.f : __expf(weight[k].y - all[1])};
#pragma unroll
        for (int v = 0; v < kUnitVecs; ++v) {
          const uint32_t words[4] = {x[k][v].x, x[k][v].y, x[k][v].z, x[k][v].w};
#pragma unroll
          for (int i = 0; i < 4; ++i) {
            const float2 pair = unpack_partial(words[i]);
            total.value[4 * v + i].x += w[i % 2] * pair.x;
            total.value[4 * v + i].y += w[i % 2] * pair.y;
          }
        }
      }
    }
  }

  // The sums of the warps that share a unit, into the first.
  __device__ void add_warps(UnitSum<kUnitVecs>& total) const {
    __shared__ float2 sums[kCombineWarps][4 * kUnitVecs][32];
    const int warp = threadIdx.x / 32;
#pragma unroll
    for (int i = 0; i < 4 * kUnitVecs; ++i) sums[warp][i][lane_] = total.value[i];
    __syncthreads();
    for (int other = 1; slice_ == 0 && other < warps_; ++other) {
#pragma unroll
      for (int i = 0; i < 4 * kUnitVecs; ++i) {
        const float2 x = sums[warp + other][i][lane_];
        total.value[i].x += x.x;
        total.value[i].y += x.y;
      }
    }
    __syncthreads();
  }

  __device__ void store(int row, int unit, const float (&all)[2], const UnitSum<kUnitVecs>& total) const {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int own = row + lane_ / 4 + 8 * h;
      const bool written = own < num_rows_;
      const RowPlace at = row_place(p_, first_row_ + (written ? own : 0));
      const float lse = splits_.overflow ? NAN : all[h];
      const float factor = splits_.overflow ? NAN : sink_factor(p_, at.head, lse);
      T* out = static_cast<T*>(p_.out) + request_ * p_.out_stride_request + at.token * p_.out_stride_token +
               at.head * p_.out_stride_head + unit * 16 * kUnitVecs;
      store_row(out, written, factor, h, total);
      if (!written) continue;
      if (p_.lse && unit == 0 && lane_ % 4 == 0) {
        p_.lse[(static_cast<int64_t>(request_) * p_.seqlen_q + at.token) * p_.num_q_heads + at.head] = lse;
      }
    }
  }

  // Columns of row h of the lane; lanes of a quad exchange pairs for runs of columns.
  __device__ void store_row(T* out, bool written, float factor, int h, const UnitSum<kUnitVecs>& total) const {
    uint32_t words[2 * kUnitVecs];
#pragma unroll
    for (int j = 0; j < 2 * kUnitVecs; ++j) {
      const float2 pair = total.value[2 * j + h];
      words[j] = attnops::sm90::pack_pair<T>(pair.x * factor, pair.y * factor);
    }
    if constexpr (kUnitVecs == 2) {
      transpose_quad(words);
      out += lane_ % 4 * 8;
      if (written && aligned_) *reinterpret_cast<uint4*>(out) = {words[0], words[1], words[2], words[3]};
    } else if (written && aligned_) {
      // Half of the sectors at a time; where it is used there is little to write.
#pragma unroll
      for (int j = 0; j < 2; ++j) *reinterpret_cast<uint32_t*>(out + 8 * j + lane_ % 4 * 2) = words[j];
    }
    if (!written || aligned_) return;
#pragma unroll
    for (int i = 0; i < 4 * kUnitVecs; ++i) {
      T* to = kUnitVecs == 2 ? out + i : out + i / 2 * 8 + lane_ % 4 * 2 + i % 2;
      *to = reinterpret_cast<const T*>(words)[i];
    }
  }

  const Params& p_;
  const int request_, first_row_, num_rows_;
  const Splits splits_;
  const int count_;  // of splits that are read
  const bool aligned_;
  const int warps_, slice_;  // warps that share a unit, and which of them this is
  const int lane_;
};

// Grid: (requests, blocks of a request, equal parts of a block's units). Where nothing is split, all that this costs is
// its launch and the code up to the first return.
template <typename T, int kUnitVecs>
__global__ void __launch_bounds__(kCombineWarps * 32, 2)
    mla_merge_units_kernel(const __grid_constant__ Params p, bool aligned) {
  const int request = static_cast<int>(blockIdx.x), block = static_cast<int>(blockIdx.y);
  const Splits splits = find_splits(p, request, block);
  attnops::sm90::wait_for_prerequisites();
  if (splits.count <= 1) return;
  if (splits.overflow && p.report && threadIdx.x == 0 && blockIdx.z == 0) {
    record_fault(p.report, {ReportOp::kMlaDecode, ReportKind::kLength, request, 0, splits.first + splits.count,
                            p.num_partials + 1});
  }
  UnitMerge<T, kUnitVecs> merge(p, request, block, splits, aligned);
  constexpr int kUnitsPerRows = kVecsPerRows / kUnitVecs, kUnits = kPlanRows / 16 * kUnitsPerRows;
  const int units = kUnits / static_cast<int>(gridDim.z), first = static_cast<int>(blockIdx.z) * units;
  const int each = min_of(units, kUnitsPerRows);
#pragma unroll 1
  for (int unit = first; unit < first + units; unit += each) {
    merge.run(unit / kUnitsPerRows * 16, {unit % kUnitsPerRows, each});
  }
}

}  // namespace attnops::mla_decode::sm90
