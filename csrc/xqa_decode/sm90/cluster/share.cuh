#pragma once
#include "device/sm90/cluster.cuh"
#include "xqa_decode/cuda/pieces.cuh"

namespace attnops::xqa_decode::sm90 {
using namespace attnops::sm90;

// How works meet the clusters of a launch: cluster c serves work c / clusters_per_work, each of
// its CTAs one share of the work's tiles. All sizes are powers of two.
struct ClusterShape {
  int log_ctas;      // CTAs of a cluster
  int log_clusters;  // clusters per work
  int log_slice;     // items of a work that each CTA of a cluster merges; an item is four values of a row

  __device__ int log_shares() const { return log_ctas + log_clusters; }
};

// One share of a work, as a walk of a single piece: the tiles that the work's queries may see, evenly divided.
class SharePiece {
 public:
  __device__ SharePiece(const Params& p, int request, int kv_head, int length, int share, int log_shares)
      : SharePiece(p, request, kv_head, length) {
    const int tiles = tiles_.count, least = tiles >> log_shares;
    divide(share, 1 << log_shares, least);
  }

  // Of any number of shares: `few` for works of up to `few_tiles` tiles, else `shares`.
  __device__ SharePiece(const Params& p, int request, int kv_head, int length, int share, int few_tiles, int few,
                        const Divisor& by_few, int shares, const Divisor& by_shares)
      : SharePiece(p, request, kv_head, length) {
    if (tiles_.count <= few_tiles) {
      divide(share, few, by_few.divide(tiles_.count));
    } else {
      divide(share, shares, by_shares.divide(tiles_.count));
    }
  }

  __device__ bool next() { return false; }
  __device__ void walk_runs(int) {}
  __device__ int request() const { return request_; }
  __device__ int kv_head() const { return kv_head_; }
  __device__ int length() const { return length_; }
  __device__ const KvRange& keys() const { return keys_; }
  __device__ int first_token() const { return first_token_; }
  __device__ int end_token() const { return end_token_; }
  __device__ bool overflows() const { return false; }
  __device__ int used_shares() const { return used_shares_; }  // the first ones; the others hold no tile

 private:
  __device__ SharePiece(const Params& p, int request, int kv_head, int length)
      : request_(request),
        kv_head_(kv_head),
        length_(length_of(length)),
        keys_(visible_keys(length_, p.seqlen_q, p.window_left)) {
    keys_.end = min_of(keys_.end, tokens_in_table(p, request));
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

// What is known of a share's beginning before the kernels ahead have ended. Its length and page numbers may not be
// there yet: they are guesses, checked for range, and nothing of them reaches a result but through `pages_now`.
template <class Tr>
class ShareGuess {
 public:
  __device__ ShareGuess(const Params& p, const Shape& shape, const ClusterShape& cluster, int request, int kv_head,
                        int share, int warp, int lane)
      : length_(load_guess(p.cache_seqlens + request)),
        piece_(p, request, kv_head, length_, share, cluster.log_shares()) {
    if (shape.page_shift < Tr::kChunkShift || p.page_table.kv_indptr) return;
    token_ = piece_.first_token() + (lane * Tr::kWarps + warp) * Tr::kChunk;
    const int cell = token_ >> shape.page_shift;
    const bool wanted = token_ >= 0 && token_ < piece_.end_token() && token_ + Tr::kChunk > piece_.keys().begin;
    if (wanted && cell < p.page_table.max_pages) cell_ = p.page_table.row(request) + cell;
  }

  __device__ const SharePiece& piece() const { return piece_; }
  __device__ bool is_right(int length) const { return length == length_; }
  // Of the warp's l-th chunk, in lane l.
  __device__ int pages_now() const { return cell_ ? __ldcg(cell_) : 0; }

  // Asks for the share's keys to be in L2, where each warp has one chunk of them at most: longer shares lose more by
  // the instructions than they gain.
  __device__ void prefetch(const Params& p, const Shape& shape, int lane) const {
    if (piece_.end_token() - piece_.first_token() > Tr::kWarps * Tr::kChunk) return;
    if (shape.page_shift < Tr::kChunkShift || !shape.vector_keys || !shape.same_strides) return;
    const int page = __shfl_sync(~0u, cell_ ? load_guess(cell_) : -1, 0);
    const int token = __shfl_sync(~0u, token_, 0);
    if (!p.page_table.has_page(page)) return;
    constexpr int kSize = Tr::kFp8 ? 1 : 2;
#pragma unroll
    for (int row = lane; row < 2 * Tr::kChunk; row += 32) {
      const int key = row % Tr::kChunk;
      if (token + key >= piece_.end_token()) continue;
      const bool is_key = row < Tr::kChunk;
      const int64_t at = page * shape.k_page + ((token + key) & (p.page_table.page_size - 1)) * shape.k_token;
      const int64_t head = piece_.kv_head() * (is_key ? p.k_stride_head : p.v_stride_head) * kSize;
      prefetch_to_l2(static_cast<const char*>(is_key ? p.k_pages : p.v_pages) + head + at, p.head_dim * kSize);
    }
  }

 private:
  int length_;
  SharePiece piece_;
  int token_ = 0;
  const int32_t* cell_ = nullptr;  // of the l-th chunk, in lane l, if it needs one
};

}  // namespace attnops::xqa_decode::sm90
