#pragma once
#include "xqa_decode/sm90/folds/fold.cuh"

namespace attnops::xqa_decode::sm90 {

// Nodes in memory, and their merge by whoever comes last. A node lies in the row of partial results of its first cut.
// Where it holds several, the row after it says how many rows from there on hold nothing: a NaN that no arithmetic
// makes.
inline constexpr uint32_t kCovered = 0x7fd0a700;
inline constexpr int kLogMemoryCuts = 4;  // of a node in memory, at most
inline constexpr uint32_t kCoveredMask = (1u << kLogMemoryCuts) - 1;

__device__ __forceinline__ int covered_rows(uint32_t bits) {
  return (bits & ~kCoveredMask) == kCovered ? static_cast<int>(bits & kCoveredMask) : 0;
}

template <class Tr>
__device__ __forceinline__ void store_node(const Params& p, const Shape& shape, const RowState<Tr>& block, int64_t slot,
                                           int cuts) {
  store_partials<true>(p, shape, block, 0, slot);
  if (cuts == 1) return;
  for (int row = threadIdx.x; row < shape.rows; row += Tr::kThreads) {
    p.lse_partial[(slot + 1) * shape.rows + row] = __uint_as_float(kCovered | (cuts - 1));
  }
}

// What a thread merges at a time: neighbouring values of a row, as many as there is room for.
template <class Tr>
inline constexpr int kMergeQuads = (Tr::kFoldLevels - 1) * Tr::kFoldLevelBytes >= 34 * 1024 ? 2 : 1;
template <class Tr>
using MergeItem = NodeItem<kMergeQuads<Tr>>;

// Where a CTA that merges has its lists and what waits for a sibling, in the place of Fold's.
template <class Tr>
struct NodeScratch {
  static constexpr int kListed = Tr::kThreads;  // cuts that are looked at together
  static constexpr int kTopLevel = 7;           // of a list; nodes above are added up in order
  uint32_t bits[kListed];                       // of each cut's lse
  int live[Tr::kWarps];                         // nodes that each warp found
  int nodes[kListed];                           // cut, and how many cuts << 16
  int before[kListed];                          // nodes before each cut
  float lse[kTopLevel][Tr::kThreads];           // of what waits
  float4 values[kTopLevel][kMergeQuads<Tr>][Tr::kThreads];

  __device__ __forceinline__ void put(int level, const MergeItem<Tr>& item) {
    lse[level][threadIdx.x] = item.lse;
#pragma unroll
    for (int i = 0; i < kMergeQuads<Tr>; ++i) values[level][i][threadIdx.x] = item.quad(i);
  }
  __device__ __forceinline__ MergeItem<Tr> get(int level, int thread) const {
    MergeItem<Tr> item;
    item.lse = lse[level][thread];
#pragma unroll
    for (int i = 0; i < kMergeQuads<Tr>; ++i) item.set(i, values[level][i][thread]);
    return item;
  }
};

// Lists the nodes among the cuts from `first` on. Returns how many.
template <class Tr>
__device__ __forceinline__ int list_nodes(const Params& p, const Shape& shape, const Splits& splits, int first,
                                          NodeScratch<Tr>& scratch) {
  const int own = threadIdx.x, cut = first + own, warp = own / 32, lane = own % 32;
  const bool is_cut = cut < splits.count;
  sync_threads<Tr::kThreads>();  // the list before is read
  scratch.bits[own] = is_cut ? __float_as_uint(__ldcg(p.lse_partial + (splits.first + cut) * shape.rows)) : 0;
  sync_threads<Tr::kThreads>();
  bool live = is_cut;
#pragma unroll
  for (int level = 1; level <= kLogMemoryCuts; ++level) {
    const int start = own & -(1 << level);
    if (start != own && start + covered_rows(scratch.bits[start + 1]) >= own) live = false;
  }
  const uint32_t mask = __ballot_sync(~0u, live);
  if (lane == 0) scratch.live[warp] = __popc(mask);
  sync_threads<Tr::kThreads>();
  int place = __popc(mask & ((1u << lane) - 1)), total = 0;
#pragma unroll
  for (int w = 0; w < Tr::kWarps; ++w) {
    if (w < warp) place += scratch.live[w];
    total += scratch.live[w];
  }
  scratch.before[own] = place;
  if (live) scratch.nodes[place] = cut | (1 + (own % 2 == 0 ? covered_rows(scratch.bits[own + 1]) : 0)) << 16;
  sync_threads<Tr::kThreads>();
  return total;
}

// How the nodes of a list are dealt to threads: `lanes` blocks of 2^log_block cuts, each up to its own node.
struct MergeLanes {
  int lanes, log_width, log_block, units;

  __device__ __forceinline__ MergeLanes(int nodes, int items, int cuts, int log_threads) {
    const int log_lanes = nodes <= (items <= 32 ? 4 : 24) ? 0 : nodes <= 48 ? 2 : 4;
    lanes = 1 << log_lanes, log_width = log_threads - log_lanes;
    log_block = max_of(32 - __clz(max_of(cuts - 1, 0)) - log_lanes, 0);
    units = (items + (1 << log_width) - 1) >> log_width;
  }
};

// Merges the nodes [begin, end) of the list, which are those of the cuts [first_cut, end_cut), to one of the level
// `cap`, or to the root. One of them at least is there.
template <class Tr>
__device__ __forceinline__ MergeItem<Tr> merge_listed(const Params& p, const Shape& shape, const Splits& splits,
                                                      int begin, int end, int first_cut, int end_cut, int cap, int row,
                                                      int d, NodeScratch<Tr>& scratch) {
  constexpr int kBatch = Tr::kFp8 ? 4 : 6;  // nodes that are loaded before the first is used
  MergeItem<Tr> node;
  TreeWalk walk{first_cut, end_cut, splits.count, cap};
#pragma unroll 1
  for (int next = begin; next < end; next += kBatch) {
    MergeItem<Tr> loaded[kBatch];
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      const int64_t at = (splits.first + (scratch.nodes[min_of(next + i, end - 1)] & 0xffff)) * shape.rows + row;
      loaded[i].lse = __ldcg(p.lse_partial + at);
#pragma unroll
      for (int k = 0; k < kMergeQuads<Tr>; ++k) {
        if (d + 4 * k < p.head_dim) loaded[i].set(k, load_partial(p, shape, at, d + 4 * k));
      }
    }
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      if (next + i >= end) break;
      const int listed = scratch.nodes[next + i], cuts = listed >> 16;
      node = loaded[i];
      walk.climb(
          listed & 0xffff, cuts == 1 ? 0 : 32 - __clz(cuts - 1), [&](int level) { scratch.put(level, node); },
          [&](int level) { node.combine(scratch.get(level, threadIdx.x)); });
    }
  }
  return node;
}

// Called by all threads once the CTA's nodes of a work are written: arrive_and_merge of the portable kernels, but the
// units are dealt to those who come by their shares of the cuts.
template <class Tr>
__device__ __forceinline__ void arrive_and_merge_nodes(const Params& p, const Shape& shape, const WorkPlace& place,
                                                       const Splits& splits, bool may_wait, uint8_t* smem) {
  using Scratch = NodeScratch<Tr>;
  static_assert(Tr::kThreads == 128 && sizeof(Scratch) <= (Tr::kFoldLevels - 1) * Tr::kFoldLevelBytes);
  Scratch& scratch = *reinterpret_cast<Scratch*>(smem + SharedLayout<Tr>::kFold);
  auto* flag = reinterpret_cast<MergeFlag*>(smem + SharedLayout<Tr>::kFlag);
  sync_threads<Tr::kThreads>();  // the nodes are written
  int32_t* semaphore = p.semaphores + place.work;
  if (threadIdx.x == 0) {
    const Units cuts = arrive(semaphore, splits.count, splits.arrivals, splits.count, may_wait);
    *flag = {cuts.early, cuts.begin, cuts.end};
    if (cuts.must_leave) {
      Leave leave;
      leave.begin(semaphore, splits.arrivals);
      leave.finish(semaphore, splits.count, splits.arrivals);
    }
  }
  sync_threads<Tr::kThreads>();
  const int early = flag->early, begin = max_of(flag->begin, early), end = flag->end;
  if (early + end - begin <= 0) return;
  const int row_items = ceil_div(p.head_dim, 4 * kMergeQuads<Tr>), items = shape.rows * row_items;
  const int listed = list_nodes<Tr>(p, shape, splits, 0, scratch);
  const bool one_list = splits.count <= Scratch::kListed;
  const MergeLanes deal(one_list ? listed : 0, items, splits.count, 7);
  const int early_units = ceil_div(early * deal.units, splits.count);
  const int begin_unit = max_of(ceil_div(begin * deal.units, splits.count), early_units);
  const int end_unit = ceil_div(end * deal.units, splits.count);
#pragma unroll 1
  for (int i = 0; i < early_units + end_unit - begin_unit; ++i) {
    const int unit = i < early_units ? i : begin_unit + i - early_units;
    const int item = (unit << deal.log_width) + (threadIdx.x & ((1 << deal.log_width) - 1));
    const int lane = threadIdx.x >> deal.log_width;
    const bool live = item < items;
    const int row = live ? item / row_items : 0, d = live ? (item - row * row_items) * 4 * kMergeQuads<Tr> : 0;
    MergeItem<Tr> node;
    if (one_list) {
      const int first = lane << deal.log_block, next = (lane + 1) << deal.log_block;
      const int first_node = first < splits.count ? scratch.before[first] : listed;
      const int end_node = next < splits.count ? scratch.before[next] : listed;
      if (first_node < end_node) {
        node = merge_listed<Tr>(p, shape, splits, first_node, end_node, first, min_of(next, splits.count),
                                deal.log_block, row, d, scratch);
      }
      if (deal.lanes > 1) {
        sync_threads<Tr::kThreads>();
        scratch.put(0, node);
#pragma unroll 1
        for (int step = 1; step < deal.lanes; step *= 2) {
          sync_threads<Tr::kThreads>();
          if ((lane & (2 * step - 1)) != 0) continue;
          node.combine(scratch.get(0, threadIdx.x + (step << deal.log_width)));
          scratch.put(0, node);
        }
        sync_threads<Tr::kThreads>();
      }
    } else {
      // Far more cuts than there are CTAs: list by list, whose nodes are added up in order.
#pragma unroll 1
      for (int first = 0; first < splits.count; first += Scratch::kListed) {
        const int count = list_nodes<Tr>(p, shape, splits, first, scratch);
        node.combine(merge_listed<Tr>(p, shape, splits, 0, count, first, min_of(first + Scratch::kListed, splits.count),
                                      7, row, d, scratch));
      }
    }
    if (!live || lane > 0) continue;
#pragma unroll
    for (int k = 0; k < kMergeQuads<Tr>; ++k) {
      float4 v = node.quad(k);
      v = make_float4(root_value(v.x), root_value(v.y), root_value(v.z), root_value(v.w));
      if (d + 4 * k < p.head_dim) store_output(p, shape, place, row, d + 4 * k, v, node.lse);
    }
  }
}

}  // namespace attnops::xqa_decode::sm90
