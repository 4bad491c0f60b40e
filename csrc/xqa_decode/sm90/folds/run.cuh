#pragma once
#include "device/sm90/shared_words.cuh"
#include "xqa_decode/sm90/folds/merge.cuh"
#include "xqa_decode/sm90/kernel.cuh"

namespace attnops::xqa_decode::sm90 {

// What must be known of a run of cuts while its tiles are multiplied: a stand-in for the piece.
struct RunOfCuts {
  SeenKeys seen;
  int first_token_, end_token_;

  __device__ __forceinline__ explicit RunOfCuts(const PieceWalk& piece)
      : seen{piece.request(), piece.length(), piece.keys()},
        first_token_(piece.first_token()),
        end_token_(piece.end_token()) {}
  __device__ __forceinline__ int request() const { return seen.request(); }
  __device__ __forceinline__ int length() const { return seen.length(); }
  __device__ __forceinline__ const KvRange& keys() const { return seen.keys(); }
  __device__ __forceinline__ int first_token() const { return first_token_; }
  __device__ __forceinline__ int end_token() const { return end_token_; }
  __device__ __forceinline__ static constexpr bool overflows() { return false; }
};

// Registers are short over FP8 pages and of more than 8 rows: the walk's state lies in shared memory while tiles are
// multiplied and nodes merged: one thread writes it, when all have read the last, and all read it after a barrier.
template <class Tr>
inline constexpr bool kPutsWalkAway = Tr::kFp8 || Tr::kRows > 8;

template <class Tr>
__device__ __forceinline__ void put_away(PieceWalk& piece, uint8_t* smem) {
  if (!kPutsWalkAway<Tr> || threadIdx.x != 0) return;
  uint32_t place = hopper::smem_address(smem) + SharedLayout<Tr>::kPiece;
  piece.visit_state([&](int word) {
    hopper::store_word(place, word);
    place += 4;
  });
}

template <class Tr>
__device__ __forceinline__ void take_back(PieceWalk& piece, uint8_t* smem) {
  if (!kPutsWalkAway<Tr>) return;
  uint32_t place = hopper::smem_address(smem) + SharedLayout<Tr>::kPiece;
  piece.visit_state([&](int& word) {
    hopper::load_word(word, place);
    place += 4;
  });
}

// What the warpgroup that multiplies does with the part's runs of cuts in batch-invariant plans: one that holds a whole
// work adds it up by itself, others leave nodes of the tree in memory, as large as they have them.
template <class Tr>
__device__ __forceinline__ void run_folded(const Params& p, const Shape& shape, const Boxes& boxes, uint8_t* smem,
                                           LongWalk& piece) {
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
    Block<Tr> block;
    consumer.begin(place, 0, block);
    if (num_tiles(piece) == 0 && count == 1) {  // no keys at all
      Fold<Tr>::finish(block);
      store_rows<true>(p, shape, place, block, 0);
      continue;
    }
    const RunOfCuts run(piece);
    const int empty = end - begin - ceil_div(num_tiles(run), leaf_tiles);
    put_away<Tr>(piece, smem);
    consumer.attend_leaves(run, leaf_tiles, empty, block, [&] {
      if (!fold.take(block)) return;
      const TreeWalk& walk = fold.walk();
      if (walk.is_root()) {
        Fold<Tr>::end_root(block);
        store_rows<true>(p, shape, place, block, 0);
      } else {
        store_node(p, shape, block, splits.first + walk.start, walk.node_end() - walk.start);
      }
    });
    take_back<Tr>(piece, smem);
    if (fold.walk().is_root()) continue;
    splits = piece.splits();
    splits.arrivals = end - begin;
    arrive_and_merge_nodes<Tr>(p, shape, place, splits, piece.is_last(), smem);
    take_back<Tr>(piece, smem);
  } while (piece.next());
}

}  // namespace attnops::xqa_decode::sm90
