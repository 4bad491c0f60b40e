#pragma once
#include "device/sm90/cluster.cuh"
#include "xqa_decode/sm90/cluster_wgmma/item_sum.cuh"
#include "xqa_decode/sm90/cluster_wgmma/limits.h"
#include "xqa_decode/sm90/cluster_wgmma/team.h"
#include "xqa_decode/sm90/row_block.cuh"

namespace attnops::xqa_decode::sm90 {

// The merge of a work's shares. An item is what a lane holds of a row in two blocks of 64 dims: d, d + 8, d + 64 and
// d + 72, or d, d + 1, d + 64 and d + 65 over e4m3 pages. The eight items of a unit lie side by side in the eight lanes
// that hold one warp's dims of a row. An odd block has items half empty.
template <class Tr>
struct TeamInbox {
  static constexpr int kUnitsPerRow = team_units_per_row(Tr::kHeadDim), kPairs = kUnitsPerRow / Tr::kWarps;
  static_assert(kPairs == ceil_div(Tr::kBlocks, 2));
  static constexpr int kUnits = Tr::kInboxBytes / (kUnitItems * 24);
  static constexpr int kValues = SharedLayout<Tr>::kInbox;           // float4 [CTAs][slice][8]
  static constexpr int kStats = kValues + kUnits * kUnitItems * 16;  // float2, the same: reference and sum
  static constexpr int kBytes = kUnits * kUnitItems * 24;
  static_assert(kBytes == Tr::kInboxBytes && kUnits >= Tr::kRows * kUnitsPerRow);
};

// Dims of an item of a unit: the first, and the others, from there.
template <class Tr>
__device__ __forceinline__ constexpr int item_dim(int unit, int item) {
  const int of_row = unit % TeamInbox<Tr>::kUnitsPerRow;
  return 128 * (of_row / Tr::kWarps) + 16 * (of_row % Tr::kWarps) + (Tr::kFp8 ? 2 * item : item);
}
template <class Tr>
__device__ __forceinline__ constexpr int item_step(int which) {
  return 64 * (which / 2) + (Tr::kFp8 ? 1 : 8) * (which % 2);
}

// Rounds to the type of q.
template <class Tr>
__device__ __forceinline__ void store_element(const Params& p, int64_t at, float value) {
  if constexpr (Tr::kFp8) {
    const uint32_t pair = p.dtype == DType::kBFloat16 ? pack2<__nv_bfloat16>(value, 0.f) : pack2<__half>(value, 0.f);
    static_cast<uint16_t*>(p.out)[at] = static_cast<uint16_t>(pair);
  } else {
    static_cast<typename Tr::T*>(p.out)[at] = static_cast<typename Tr::T>(value);
  }
}

inline constexpr int kFew = 4;  // CTAs whose results one thread merges

// Rows of a work, which may be a block of a request's.
__device__ __forceinline__ int rows_of(const Shape& shape, const WorkPlace& place) {
  return place.rows > 0 ? place.rows : shape.rows;
}

// Sends the CTA's results of each unit to the CTA that merges it: sums with their references, or, where kernels fold
// (fold_merge.cuh), mean values with their lse.
template <class Tr>
__device__ __forceinline__ void send_units(const Team& team, const RowState<Tr>& block, int rows, int rank,
                                           uint32_t shared) {
  using In = TeamInbox<Tr>;
  const int warp = threadIdx.x / 32, g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
#pragma unroll
  for (int n = 0; n < Tr::kRowTiles; ++n) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int row = 8 * n + 2 * t + i;
      if (row >= rows) continue;
#pragma unroll
      for (int pair = 0; pair < In::kPairs; ++pair) {
        const int unit = row * In::kUnitsPerRow + pair * Tr::kWarps + warp;
        const int owner = team.by_slice.divide(unit);
        const int at = (rank * team.slice + unit - owner * team.slice) * kUnitItems + g;
        const uint32_t there = address_in(shared, owner), barrier = there + SharedLayout<Tr>::kInboxFull;
        float4 values = make_float4(block.out[2 * pair][4 * n + i], block.out[2 * pair][4 * n + 2 + i], 0.f, 0.f);
        if (2 * pair + 1 < Tr::kBlocks) {
          const float(&more)[RowState<Tr>::kScores] = block.out[min_of(2 * pair + 1, Tr::kBlocks - 1)];
          values.z = more[4 * n + i], values.w = more[4 * n + 2 + i];
        }
        // A row that saw no key here may hold NaN, from keys of other rows.
        if (!Tr::kFolds && block.sum[n][i] == 0.f) values = make_float4(0.f, 0.f, 0.f, 0.f);
        store_async(there + In::kValues + at * 16, values, barrier);
        const float sum = Tr::kFolds ? 0.f : block.sum[n][i];
        store_async(there + In::kStats + at * 8, make_float2(block.reference[n][i], sum), barrier);
      }
    }
  }
}

// Merges the CTA's slice of the units, which the `senders` CTAs of the cluster send to it; `own` units. For up to four
// CTAs, which are all of the work's: a thread to an item.
template <class Tr>
__device__ __forceinline__ void merge_few(const Params& p, const Shape& shape, const Team& team, const WorkPlace& place,
                                          int rank, int senders, int own, uint32_t shared, const uint8_t* smem) {
  using In = TeamInbox<Tr>;
#pragma unroll 1
  for (int item = threadIdx.x; item < own * kUnitItems; item += Tr::kThreads) {
    const int unit = rank * team.slice + item / kUnitItems;
    const int d = item_dim<Tr>(unit, item % kUnitItems);
    const OutputPlace to(p, shape, place, place.first_row + unit / In::kUnitsPerRow, d);
    mbarrier_wait_cluster(shared + SharedLayout<Tr>::kInboxFull, 0);
    float2 stat[kFew];
    float4 values[kFew];
    ItemSum total;
#pragma unroll
    for (int i = 0; i < kFew; ++i) {
      const int at = min_of(i, senders - 1) * team.slice * kUnitItems + item;
      values[i] = *reinterpret_cast<const float4*>(smem + In::kValues + at * 16);
      stat[i] = *reinterpret_cast<const float2*>(smem + In::kStats + at * 8);
      if (i >= senders) stat[i].x = -INFINITY;
      total.top = fmaxf(total.top, stat[i].x);
    }
#pragma unroll
    for (int i = 0; i < kFew; ++i) total.add(exp2_approx(stat[i].x - total.top), stat[i].y, values[i]);
    const float lse = total.lse(Tr::kProbShift);
    const float4 mean = total.mean();
    const float factor = to.factor(lse);
    if (to.lse) *to.lse = lse;
    const float all[4] = {mean.x, mean.y, mean.z, mean.w};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if (d + item_step<Tr>(i) < p.head_dim) store_element<Tr>(p, to.at + item_step<Tr>(i), all[i] * factor);
    }
  }
}

// The same for any number of CTAs, four lanes to an item. `clusters` clusters share the work.
template <class Tr>
__device__ __forceinline__ void merge_units(const Params& p, const Shape& shape, const Team& team,
                                            const WorkPlace& place, int rank, int senders, int cluster_index,
                                            int clusters, uint32_t shared, const uint8_t* smem) {
  using In = TeamInbox<Tr>;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int units = rows_of(shape, place) * In::kUnitsPerRow;
  const int first = rank * team.slice, end = min_of(first + team.slice, units);
  const int which = lane / kUnitItems;  // of an item's four dims, for this lane to store
#pragma unroll 1
  for (int unit = first + warp; unit < end; unit += Tr::kWarps) {
    const int d = item_step<Tr>(which) + item_dim<Tr>(unit, lane % kUnitItems);
    const OutputPlace to(p, shape, place, place.first_row + unit / In::kUnitsPerRow, d);
    mbarrier_wait_cluster(shared + SharedLayout<Tr>::kInboxFull, 0);
    ItemSum total = sum_terms<kMaxClusterCtas / 4>(senders, lane, [&](int i, float* sum, float4* v) {
      const int at = (i * team.slice + unit - first) * kUnitItems + lane % kUnitItems;
      *v = *reinterpret_cast<const float4*>(smem + In::kValues + at * 16);
      const float2 stat = *reinterpret_cast<const float2*>(smem + In::kStats + at * 8);
      *sum = stat.y;
      return stat.x;
    });
    if (clusters > 1 &&
        !meet_clusters<Tr>(p, units, team.clusters, place.work, cluster_index, clusters, unit, lane, total)) {
      continue;
    }
    const float lse = total.lse(Tr::kProbShift);
    const float4 mean = total.mean();
    if (to.lse) *to.lse = lse;
    const float value = which == 0 ? mean.x : which == 1 ? mean.y : which == 2 ? mean.z : mean.w;
    if (d >= p.head_dim) continue;
    store_element<Tr>(p, to.at, value * to.factor(lse));
  }
}

}  // namespace attnops::xqa_decode::sm90
