#pragma once
#include "xqa_decode/sm90/cluster/item_sum.cuh"
#include "xqa_decode/sm90/cluster/share.cuh"

namespace attnops::xqa_decode::sm90 {

// The merge of a work's shares. Items (four values of a row) are dealt to the CTAs of the cluster in slices; every CTA
// sends each item that it has summed up to the item's owner, and the owner's warps merge eight items at a time: a
// unit, which lies in one row. Where a work has several clusters, units meet again in memory; the last to come merges
// them. Sums are formed in the order of the shares.

// Where a CTA receives, in its shared memory.
template <class Tr>
struct Inbox {
  static constexpr int kItems = Tr::kRows * Tr::kHeadDim / 4;  // of a slice, times the CTAs of a cluster
  static constexpr int kBarrier = 1008;                        // in what the queries' alignment leaves free
  static constexpr int kValues = SharedLayout<Tr>::bytes(1);   // float4 [CTAs][slice]
  static constexpr int kStats = kValues + kItems * 16;         // float2 [CTAs][slice]: maximum and sum
  static constexpr int kBytes = kStats + kItems * 8;           // of all shared memory
  static_assert(SharedLayout<Tr>::kRowScale + Tr::kWarps * Tr::kRows * 4 <= kBarrier);
};

// Puts the four warps' results of each item together and sends them to the owners.
template <class Tr>
__device__ __forceinline__ void send_items(const Shape& shape, const ClusterShape& cluster, int rank, uint8_t* smem) {
  using Shared = SharedLayout<Tr>;
  const auto* stats = reinterpret_cast<const float2*>(smem + Shared::kStats);
  constexpr int kVecs = Tr::kHeadDim / 4;
  const int slice = 1 << cluster.log_slice;
  const uint32_t here = attnops::smem_address(smem);
#pragma unroll 1
  for (int item = threadIdx.x; item < shape.rows * kVecs; item += Tr::kThreads) {
    const int row = item / kVecs, d = item % kVecs * 4;
    float2 stat[Tr::kWarps];
    ItemSum total;
#pragma unroll
    for (int w = 0; w < Tr::kWarps; ++w) {
      stat[w] = stats[w * Tr::kRows + row];
      total.top = fmaxf(total.top, stat[w].x);
    }
    const float base = total.top == -INFINITY ? 0.f : total.top;
#pragma unroll
    for (int w = 0; w < Tr::kWarps; ++w) {
      const float factor = exp2_approx(stat[w].x - base);
      auto v = *reinterpret_cast<const float4*>(smem + Shared::kRing + w * Tr::kRingBytes +
                                                4 * RowTile<Tr>::scratch_at(row, d));
      // A warp that saw no key of this row may hold NaN there, from keys of other rows: select, do not multiply.
      if (factor == 0.f) v = make_float4(0.f, 0.f, 0.f, 0.f);
      total.add(factor, stat[w].y, v);
    }
    const int owner = item >> cluster.log_slice;
    const int at = (rank << cluster.log_slice) + (item & (slice - 1));
    const uint32_t there = address_in(here, owner), barrier = there + Inbox<Tr>::kBarrier;
    store_async(there + Inbox<Tr>::kValues + at * 16, total.values, barrier);
    store_async(there + Inbox<Tr>::kStats + at * 8, make_float2(total.top, total.sum), barrier);
  }
}

// Merges what the `senders` CTAs of the cluster send to this one. `clusters` of them share the work.
template <class Tr>
__device__ __forceinline__ void merge_slice(const Params& p, const Shape& shape, const ClusterShape& cluster,
                                            const WorkPlace& place, int rank, int senders, int cluster_index,
                                            int clusters, int warp, int lane, const uint8_t* smem) {
  constexpr int kVecs = Tr::kHeadDim / 4;
  const int slice = 1 << cluster.log_slice, first = rank << cluster.log_slice;
  const int end = min_of(first + slice, shape.rows * kVecs);
#pragma unroll 1
  for (int item = first + warp * kUnitItems + lane % kUnitItems; item - lane % kUnitItems < end;
       item += Tr::kWarps * kUnitItems) {
    const int row = item / kVecs, d = item % kVecs * 4;
    const OutputPlace to(p, shape, place, min_of(row, shape.rows - 1), d);
    mbarrier_wait_cluster(attnops::smem_address(smem) + Inbox<Tr>::kBarrier, 0);
    ItemSum total = sum_terms<kMaxClusterCtas / 4>(senders, lane, [&](int i, float* sum, float4* v) {
      const int at = (i << cluster.log_slice) + item - first;
      *v = *reinterpret_cast<const float4*>(smem + Inbox<Tr>::kValues + at * 16);
      const float2 stat = *reinterpret_cast<const float2*>(smem + Inbox<Tr>::kStats + at * 8);
      *sum = stat.y;
      return stat.x;
    });
    if (clusters > 1 && !meet_clusters<Tr>(p, shape, 1 << cluster.log_clusters, place.work, cluster_index, clusters,
                                           item / kUnitItems, lane, total)) {
      continue;
    }
    if (lane < kUnitItems && d < p.head_dim) to.store(p, shape, total.mean(), total.lse(Tr::kProbShift));
  }
}

}  // namespace attnops::xqa_decode::sm90
