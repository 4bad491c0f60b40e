#pragma once
#include "xqa_decode/cuda/pieces.cuh"
#include "xqa_decode/sm90/cluster_wgmma/team.h"

namespace attnops::xqa_decode::sm90 {

// Quotient, rounded up, of small positive numbers: shorter than the compiler's division.
__device__ __forceinline__ int ceil_div_small(int a, int b) {
  const int dividend = a + b - 1;
  int quotient = static_cast<int>(__fdividef(static_cast<float>(dividend), static_cast<float>(b)));
  if (quotient * b > dividend) --quotient;
  if ((quotient + 1) * b <= dividend) ++quotient;
  return quotient;
}

// One share of a work in batch-invariant mode, as a walk of a single piece: 2^log_run() leaves (fold.cuh), as few as
// reach over the work with the team's shares.
class LeafPiece {
 public:
  __device__ __forceinline__ LeafPiece(const Params& p, const Team& team, int request, int kv_head, int length,
                                       int share, bool inlines)
      : request_(request),
        kv_head_(kv_head),
        length_(length_of(length)),
        keys_(visible_keys(length_, p.seqlen_q, p.window_left)) {
    keys_.end = min_of(keys_.end, inlines ? tokens_in_table_inline(p, request) : tokens_in_table(p, request));
    const TileRange tiles = tiles_over(keys_, kPlanTileTokens);
    tiles_ = tiles.count;
    leaf_tiles_ = min_of(team.cut_tiles, tiles_);
    if (team.cuts > 0) {  // tiles_per_cut, without a division
      leaf_tiles_ = team.by_cuts.divide(tiles_ + team.cuts - 1);
      if (team.cuts <= kFewCuts) leaf_tiles_ = round_up(leaf_tiles_, 2);
      leaf_tiles_ = max_of(leaf_tiles_, team.cut_tiles);
    }
    span_ = leaf_tiles_;
    while (span_ * team.shares < tiles_) span_ *= 2, ++log_run_;
    share_ = share;
    first_token_ = (tiles.first + share * span_) * kPlanTileTokens;
    end_token_ = min_of((tiles.first + min_of((share + 1) * span_, tiles_)) * kPlanTileTokens, keys_.end);
  }

  __device__ int request() const { return request_; }
  __device__ int kv_head() const { return kv_head_; }
  __device__ int length() const { return length_; }
  __device__ const KvRange& keys() const { return keys_; }
  __device__ int first_token() const { return first_token_; }
  __device__ int end_token() const { return end_token_; }
  __device__ bool overflows() const { return false; }
  __device__ int leaf_tiles() const { return leaf_tiles_; }
  __device__ int first_leaf() const { return share_ << log_run_; }
  __device__ int end_leaf() const { return min_of(first_leaf() + (1 << log_run_), known_leaves()); }
  // Of the work, or more where the share is not its last one.
  __device__ int known_leaves() const {
    const int left = tiles_ - share_ * span_;
    return left > span_ ? 1 << 30 : first_leaf() + (log_run_ == 0 ? 1 : ceil_div_small(left, leaf_tiles_));
  }
  __device__ int used_shares() const { return ceil_div_small(tiles_, span_); }  // the first; the others hold no tile

 private:
  int request_, kv_head_, length_, share_, tiles_, leaf_tiles_, span_, log_run_ = 0, first_token_, end_token_;
  KvRange keys_;
};

}  // namespace attnops::xqa_decode::sm90
