#pragma once
#include "device/sm90/cluster.cuh"
#include "xqa_decode/cuda/pieces.cuh"

namespace attnops::xqa_decode::sm90 {

// One share of a work, as a walk of a single piece: the tiles that the work's queries may see, evenly divided.
class SharePiece {
 public:
  // `few` shares of works of up to `few_tiles` tiles, else `shares`. `inlines`: see tokens_in_table_inline.
  __device__ SharePiece(const Params& p, int request, int kv_head, int length, int share, int few_tiles, int few,
                        const Divisor& by_few, int shares, const Divisor& by_shares, bool inlines)
      : SharePiece(p, request, kv_head, length, inlines) {
    // Both quotients: to choose a divisor would be a load from parameters by an address that the length decides.
    const int least_of_few = by_few.divide(tiles_.count), least = by_shares.divide(tiles_.count);
    const bool is_few = tiles_.count <= few_tiles;
    divide(share, is_few ? few : shares, is_few ? least_of_few : least);
  }

  __device__ int request() const { return request_; }
  __device__ int kv_head() const { return kv_head_; }
  __device__ int length() const { return length_; }
  __device__ const KvRange& keys() const { return keys_; }
  __device__ int first_token() const { return first_token_; }
  __device__ int end_token() const { return end_token_; }
  __device__ bool overflows() const { return false; }
  __device__ int used_shares() const { return used_shares_; }  // the first ones; the others hold no tile

 private:
  __device__ SharePiece(const Params& p, int request, int kv_head, int length, bool inlines)
      : request_(request),
        kv_head_(kv_head),
        length_(length_of(length)),
        keys_(visible_keys(length_, p.seqlen_q, p.window_left)) {
    keys_.end = min_of(keys_.end, inlines ? tokens_in_table_inline(p, request) : tokens_in_table(p, request));
    tiles_ = tiles_over(keys_, kPlanTileTokens);
  }

  // The first shares have one tile more than the others, which have `least`.
  __device__ void divide(int share, int shares, int least) {
    const int longer = tiles_.count - least * shares;
    used_shares_ = min_of(tiles_.count, shares);
    const int tile = tiles_.first + share * least + min_of(share, longer);
    first_token_ = tile * kPlanTileTokens;
    end_token_ = min_of((tile + least + (share < longer ? 1 : 0)) * kPlanTileTokens, keys_.end);
  }

  int request_, kv_head_, length_, first_token_, end_token_, used_shares_;
  KvRange keys_;
  TileRange tiles_;
};

}  // namespace attnops::xqa_decode::sm90
