#pragma once
#include "xqa_decode/sm90/cluster_wgmma/merge.cuh"
#include "xqa_decode/sm90/folds/fold.cuh"

namespace attnops::xqa_decode::sm90 {

// The merge of merge.cuh for batch-invariant calls: every CTA sends a node of the tree (fold.cuh) instead of sums, and
// nodes meet in the tree's order.

using TeamItem = NodeItem<1>;

template <class Tr>
__device__ __forceinline__ void load_sent(TeamItem& node, int at, const uint8_t* smem) {
  using In = TeamInbox<Tr>;
  const float lse = *reinterpret_cast<const float*>(smem + In::kStats + at * 8);
  node.lse = lse;
  node.set(0, *reinterpret_cast<const float4*>(smem + In::kValues + at * 16));
}

// Up to four CTAs, which are all of the work's: a thread to an item.
template <class Tr>
__device__ __forceinline__ void merge_few_nodes(const Params& p, const Shape& shape, const Team& team,
                                                const WorkPlace& place, int rank, int senders, int own, uint32_t shared,
                                                const uint8_t* smem) {
  using In = TeamInbox<Tr>;
#pragma unroll 1
  for (int item = threadIdx.x; item < own * kUnitItems; item += Tr::kThreads) {
    const int unit = rank * team.slice + item / kUnitItems;
    const int d = item_dim<Tr>(unit, item % kUnitItems);
    const OutputPlace to(p, shape, place, unit / In::kUnitsPerRow, d);
    mbarrier_wait_cluster(shared + SharedLayout<Tr>::kInboxFull, 0);
    TeamItem nodes[kFew];
#pragma unroll
    for (int i = 0; i < kFew; ++i) {
      load_sent<Tr>(nodes[i], min_of(i, senders - 1) * team.slice * kUnitItems + item, smem);
      if (i >= senders) nodes[i].lse = -INFINITY;
    }
    combine_all(nodes);
    const float factor = to.factor(nodes[0].lse);
    if (to.lse) *to.lse = nodes[0].lse;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int step = item_step<Tr>(i);
      if (d + step < p.head_dim) store_element<Tr>(p, to.at + step, __fmul_rn(factor, root_value(nodes[0].values[i])));
    }
  }
}

// The tree above `count` nodes, four lanes to an item, each with neighbours; `load(i, node)` gives the i-th.
template <class Load>
__device__ __forceinline__ TeamItem combine_lanes(int count, int lane, const Load& load) {
  TeamItem nodes[kMaxClusterCtas / 4];
#pragma unroll
  for (int i = 0; i < kMaxClusterCtas / 4; ++i) {
    const int which = lane / kUnitItems * (kMaxClusterCtas / 4) + i;
    if (which < count) load(which, nodes[i]);
  }
  combine_all(nodes);
  nodes[0].combine(nodes[0].shuffled(kUnitItems));
  nodes[0].combine(nodes[0].shuffled(2 * kUnitItems));
  return nodes[0];
}

// A unit of one cluster among those of the work's others, in memory, as meet_clusters.
static_assert(kMaxTeamClusters <= kMaxClusterCtas);
__device__ __forceinline__ bool meet_nodes(const Params& p, int units, int most, int work, int cluster_index,
                                           int clusters, int unit, int lane, TeamItem& node) {
  const int first = work * most * units + unit;  // of the records of this unit
  auto* values = reinterpret_cast<float4*>(p.out_partial);
  if (lane < kUnitItems) {
    values[static_cast<int64_t>(first + cluster_index * units) * kUnitItems + lane] = node.quad(0);
    if (lane == 0) p.lse_partial[first + cluster_index * units] = node.lse;
  }
  __syncwarp();
  unsigned before = 0;
  int32_t* semaphore = p.semaphores + work * units + unit;
  if (lane == 0) {
    before = add_acq_rel(semaphore, 1);
    if (before + 1 == clusters) *semaphore = 0;
  }
  if (__shfl_sync(~0u, before, 0) + 1 != clusters) return false;
  __syncwarp();  // what lane 0 has acquired is there for all lanes: a shuffle orders no memory
  node = combine_lanes(clusters, lane, [&](int i, TeamItem& other) {
    const int record = first + i * units;
    other.lse = __ldcg(p.lse_partial + record);
    other.set(0, __ldcg(values + static_cast<int64_t>(record) * kUnitItems + lane % kUnitItems));
  });
  return true;
}

// The same for any number of CTAs, four lanes to an item. `clusters` clusters share the work.
template <class Tr>
__device__ __forceinline__ void merge_nodes(const Params& p, const Shape& shape, const Team& team,
                                            const WorkPlace& place, int rank, int senders, int cluster_index,
                                            int clusters, uint32_t shared, const uint8_t* smem) {
  using In = TeamInbox<Tr>;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int first = rank * team.slice, end = min_of(first + team.slice, shape.rows * In::kUnitsPerRow);
  const int which = lane / kUnitItems;  // of an item's four dims, for this lane to store
#pragma unroll 1
  for (int unit = first + warp; unit < end; unit += Tr::kWarps) {
    const int d = item_step<Tr>(which) + item_dim<Tr>(unit, lane % kUnitItems);
    const OutputPlace to(p, shape, place, unit / In::kUnitsPerRow, d);
    mbarrier_wait_cluster(shared + SharedLayout<Tr>::kInboxFull, 0);
    TeamItem node = combine_lanes(senders, lane, [&](int i, TeamItem& other) {
      load_sent<Tr>(other, (i * team.slice + unit - first) * kUnitItems + lane % kUnitItems, smem);
    });
    if (clusters > 1 && !meet_nodes(p, shape.rows * In::kUnitsPerRow, team.clusters, place.work, cluster_index,
                                    clusters, unit, lane, node)) {
      continue;
    }
    if (to.lse) *to.lse = node.lse;
    const float value = which == 0   ? node.values[0]
                        : which == 1 ? node.values[1]
                        : which == 2 ? node.values[2]
                                     : node.values[3];
    if (d >= p.head_dim) continue;
    store_element<Tr>(p, to.at, __fmul_rn(to.factor(node.lse), root_value(value)));
  }
}

}  // namespace attnops::xqa_decode::sm90
