#pragma once
#include "mla_decode/sm90/pieces.cuh"

namespace attnops::mla_decode::sm90::few_rows {

// Walks what part blockIdx.x owns, where a request is one work. Every warp walks by itself and sees the same.
class RequestWalk {
 public:
  __device__ explicit RequestWalk(const Params& p)
      : entry_(entry_of(p, blockIdx.x)), request_(entry_.begin_work), tile_(entry_.begin_tile) {}

  __device__ const SplitKvEntry& entry() const { return entry_; }

  __device__ bool next(const Params& p, Piece& piece) {
    const int last = last_work_of(entry_);
    while (request_ <= last) {
      piece.request = request_;
      piece.first_row = 0;
      piece.num_rows = p.seqlen_q * p.num_q_heads;
      piece.length = max_of(p.cache_seqlens[request_], 0);
      piece.keys = visible_keys(piece.length, p.seqlen_q, p.window_left);
      if (p.report) {
        const int64_t capacity = p.page_table.num_cells(request_) * p.page_table.page_size;
        piece.keys.end = static_cast<int>(min_of(static_cast<int64_t>(piece.keys.end), capacity));
      }
      const TileRange range = tiles_of(p, piece.length);
      const int end = request_ == entry_.end_work ? entry_.end_tile : range.count;
      piece.first_tile = range.first + tile_;
      if (p.fixed_split_tokens == 0) {
        const bool is_first = request_ == entry_.begin_work;
        const int splits = is_first ? entry_.begin_num_splits : request_ == last ? entry_.last_num_splits : 1;
        piece.num_tiles = end - tile_;
        piece.partial = splits > 1 ? partial_slot(blockIdx.x, is_first) : -1;
        advance();
        return true;
      }
      const int cut_tiles = p.fixed_split_tokens / kPlanTileTokens;
      const int cuts = ceil_div(range.count, cut_tiles);
      const int64_t first = p.num_splits[request_];
      piece.num_tiles = min_of(cut_tiles, end - tile_);
      piece.partial = cuts > 1 ? static_cast<int>(first + tile_ / cut_tiles) : -1;
      tile_ += cut_tiles;
      if (tile_ >= end) advance();
      if (cuts == 1 || first + cuts <= p.num_partials) return true;
      // More cuts than the caller has room for: the merge makes it seen.
    }
    return false;
  }

 private:
  __device__ void advance() {
    ++request_;
    tile_ = 0;
  }

  const SplitKvEntry entry_;
  int request_, tile_;
};

}  // namespace attnops::mla_decode::sm90::few_rows
