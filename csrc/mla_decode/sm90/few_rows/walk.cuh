#pragma once
#include <type_traits>

#include "mla_decode/sm90/pieces.cuh"

namespace attnops::mla_decode::sm90::few_rows {

// The splits of a request, in the order of their tiles, and where their partial results lie.
struct RequestSplits {
  int count, index;         // how many, and which this one is
  int first, second, step;  // rows of out_partial: of split 0, of split 1, and from there on

  __device__ int slot(int i) const { return i == 0 ? first : second + (i - 1) * step; }
};

__device__ inline RequestSplits balanced_splits(int first_part, int count, int index) {
  return {count, index, 2 * first_part + 1, 2 * first_part + 2, 2};
}

struct RequestPiece : Piece {
  RequestSplits splits;
  bool is_last;  // of its part
};

// Walks what part blockIdx.x owns, where a request is one work. Every warp walks by itself and sees the same.
template <Options kOptions>
class RequestWalkFor {
 public:
  RequestWalkFor() = default;
  __device__ explicit RequestWalkFor(const Params& p) { begin(p); }

  __device__ void begin(const Params& p) {
    entry_ = entry_for<kOptions>(p, blockIdx.x);
    request_ = entry_.begin_work;
    tile_ = entry_.begin_tile;
  }

  __device__ const SplitKvEntry& entry() const { return entry_; }

  // The request of the next piece where that is known for sure, else -1.
  __device__ int upcoming(const Params& p) const {
    return request_ <= last_work_of(entry_) && (p.fixed_split_tokens == 0 || tile_ > 0) ? request_ : -1;
  }

  // Goes to the next piece; false when there is none. A RequestPiece brings its splits, a Piece only where the plan
  // puts its partial result: registers are short in the kernels that ask for no more.
  template <class AnyPiece>
  __device__ bool next(const Params& p, AnyPiece& piece) {
    constexpr bool kSplits = std::is_same_v<AnyPiece, RequestPiece>;
    const int last = last_work_of(entry_);
    while (request_ <= last) {
      piece.request = request_;
      piece.first_row = 0;
      piece.num_rows = p.seqlen_q * p.num_q_heads;
      piece.length = length_of(keys_of<kOptions>(p, request_));
      piece.keys = visible_keys(piece.length, p.seqlen_q, p.window_left);
      piece.keys.end = min_of(piece.keys.end, p.page_table.num_tokens(request_));
      const TileRange range = tiles_of(p, piece.length);
      const int end = request_ == entry_.end_work ? entry_.end_tile : range.count;
      piece.first_tile = range.first + tile_;
      if (p.fixed_split_tokens == 0) {
        const bool is_first = request_ == entry_.begin_work, is_last = request_ == last;
        piece.num_tiles = tiles_in_table(piece, end - tile_);
        if constexpr (kSplits) {
          piece.is_last = is_last;
          piece.splits = is_first ? balanced_splits(entry_.first_part, entry_.begin_num_splits, entry_.begin_split)
                                  : balanced_splits(blockIdx.x, is_last ? entry_.last_num_splits : 1, 0);
          piece.partial = piece.splits.count > 1 ? piece.splits.slot(piece.splits.index) : -1;
        } else {
          piece.partial = balanced_partial(entry_, request_);
        }
        advance();
        return true;
      }
      const int cut_tiles = p.fixed_split_tokens / kPlanTileTokens;
      const int cuts = ceil_div(range.count, cut_tiles);
      const int64_t first = p.num_splits[request_];
      const int index = min_of(tile_ / cut_tiles, cuts - 1);
      if constexpr (kSplits) piece.splits = {cuts, index, static_cast<int>(first), static_cast<int>(first) + 1, 1};
      piece.num_tiles = tiles_in_table(piece, min_of(cut_tiles, end - tile_));
      piece.partial = cuts > 1 ? static_cast<int>(first) + index : -1;
      tile_ += cut_tiles;
      if (tile_ >= min_of(end, range.count)) advance();
      if (cuts == 1 || has_room(p, first, cuts)) return true;
      // More cuts than the caller has room for: the merge makes it seen.
    }
    return false;
  }

 private:
  __device__ void advance() {
    ++request_;
    tile_ = 0;
  }

  SplitKvEntry entry_;
  int request_, tile_;
};

// The same of a short call, where a CTA has one piece or none. Of a work that is cut, `partial` says where the result
// goes; where a cluster merges the pieces, how many they are.
template <int kRows, bool kCluster = false>
class ShortWalk {
 public:
  __device__ explicit ShortWalk(const Params&) {}

  __device__ bool next(const Params& p, Piece& piece) {
    const ShortPiece<kRows> at(p, blockIdx.x);
    if (done_ || at.cut >= at.cuts) return false;
    done_ = true;
    describe(p, at, piece);
    return true;
  }

  __device__ static void describe(const Params& p, const ShortPiece<kRows>& at, Piece& piece) {
    piece.request = at.request;
    piece.first_row = at.first_row;
    piece.num_rows = at.num_rows(p);
    piece.length = at.keys.end;
    piece.keys = {0, at.keys.end};
    piece.first_tile = at.tiles * at.cut / at.cuts;
    piece.num_tiles = at.tiles * (at.cut + 1) / at.cuts - piece.first_tile;
    piece.partial = at.cuts == 1 ? -1 : kCluster ? at.cuts : static_cast<int>(blockIdx.x);
  }

 private:
  bool done_ = false;
};

}  // namespace attnops::mla_decode::sm90::few_rows
