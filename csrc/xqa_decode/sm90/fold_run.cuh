#pragma once
#include "xqa_decode/sm90/fold_merge.cuh"
#include "xqa_decode/sm90/kernel.cuh"

namespace attnops::xqa_decode::sm90 {

// What the warpgroup that multiplies does with the part's runs of cuts in batch-invariant plans: one that holds a whole
// work adds it up by itself, others leave nodes of the tree in memory, as large as they have them.
template <class Tr>
__device__ __forceinline__ void run_folded(const Params& p, const Shape& shape, const Boxes& boxes, uint8_t* smem,
                                           PieceWalk& piece) {
  Consumer<Tr> consumer(p, shape, boxes, smem);
  do {
    const WorkPlace place{piece.work(), piece.request(), piece.kv_head()};
    Splits splits = piece.splits();
    if (piece.overflows()) {
      if (piece.starts_work()) store_nan(p, shape, place, splits, Tr::kThreads);
      continue;
    }
    const int leaf_tiles = piece.tiles_of_one_cut(), count = splits.count, begin = splits.index;
    const int end = min_of(begin + ceil_div(piece.tiles(), leaf_tiles), count);
    const bool whole = begin == 0 && end == count && count <= 1 << Tr::kFoldLevels;
    Fold<Tr> fold(smem, begin, end, count, whole ? Tr::kFoldLevels : min_of(Tr::kFoldLevels, kLogMemoryCuts));
    RowBlock<Tr> block;
    consumer.begin(place, 0, block);
    if (num_tiles(piece) == 0) {  // no keys at all, and one cut
      Fold<Tr>::finish(block);
      store_rows<true>(p, shape, place, block, 0);
      continue;
    }
    consumer.attend_leaves(piece, leaf_tiles, block, [&] {
      if (!fold.take(block)) return;
      const TreeWalk& walk = fold.walk();
      if (walk.is_root()) {
        Fold<Tr>::end_root(block);
        store_rows<true>(p, shape, place, block, 0);
      } else {
        store_node(p, shape, block, splits.first + walk.start, walk.node_end() - walk.start);
      }
    });
    if (fold.walk().is_root()) continue;
    splits.arrivals = end - begin;
    arrive_and_merge_nodes<Tr>(p, shape, place, splits, piece.is_last(), smem);
  } while (piece.next());
}

}  // namespace attnops::xqa_decode::sm90
