#pragma once
#include <climits>

#include "device/common/tree_rows.cuh"
#include "device/sm80/cp_async.cuh"
#include "xqa_decode/sm90/tile_stream.cuh"

namespace attnops::xqa_decode::sm90 {

// What stands in for TileStream where a page holds too few tokens for a box: two warps copy row by row, one the keys
// and one the values, each into every second unit of the ring; for two groups four warps, half of a unit each. Sixteen
// bytes a lane, so that some lanes have a row's columns and a few rows go with one instruction; the rows' places, in
// units of 16 bytes from the pool's head, lie two to a lane and go round by shuffles. Rows that no row of q sees become
// zeros.
template <class Tr>
class GatherStream {
 private:
  static constexpr int kRowsOfWarp = Tr::kTileTokens / Tr::kBringersOfUnit, kHeld = kRowsOfWarp / 32;

 public:
  // `warp`: which of those that copy this is. Odd ones copy values; of four, the last two the second half of a tile.
  __device__ GatherStream(const Params& p, const Shape& shape, uint32_t shared, int warp, int lane)
      : p_(p),
        shape_(shape),
        values_(warp % 2 == 1),
        first_row_(warp / 2 * kRowsOfWarp),
        ring_(shared + SharedLayout<Tr>::kRing),
        full_(shared + SharedLayout<Tr>::kFull),
        empty_(shared + SharedLayout<Tr>::kEmpty),
        lane_(lane),
        column_(lane % kLanesPerRow),
        page_step_(static_cast<uint32_t>((values_ ? shape.v_page : shape.k_page) / 16)),
        token_step_(static_cast<uint32_t>((values_ ? shape.v_token : shape.k_token) / 16)) {
    const int row = first_row_ + lane / kLanesPerRow;
    inside_ = column_ * 16 < p.head_dim * kSize;
    destination_ = ring_ + column_ / 8 * hopper::kTileBytes + hopper::swizzled(row, column_ % 8);
    if (values_) place_.advance();
  }

  // All tiles of a piece.
  template <class Piece>
  __device__ __forceinline__ void bring(const Piece& piece) {
    if (num_tiles(piece) == 0) return;
    open(piece);
    const int token = piece.first_token() + first_row_ + lane_;
    int pages[kHeld];
#pragma unroll
    for (int i = 0; i < kHeld; ++i) pages[i] = page_of(token + 32 * i);
    bring(piece, pages);
  }

  template <class Piece>
  __device__ __forceinline__ void open(const Piece& piece) {
    begin_token_ = piece.keys().begin;
    end_token_ = piece.end_token();
    request_ = piece.request();
    first_draft_ = p_.tree_mask ? piece.length() - p_.tree_keys : INT_MAX;
    row_ = cells_of<Tr>(p_, request_);
    const int64_t head = piece.kv_head() * (values_ ? p_.v_stride_head : p_.k_stride_head) * kSize;
    base_ = static_cast<const char*>(values_ ? p_.v_pages : p_.k_pages) + head + column_ * 16;
  }

  // The cell of the table that says where this lane's `half` of the open piece's first tile lies; null where there is
  // none.
  template <class Piece>
  __device__ __forceinline__ const int32_t* first_cell(const Piece& piece, int half) const {
    const int token = piece.first_token() + first_row_ + lane_ + 32 * half;
    const bool wanted = token >= 0 && is_seen(token) && cell_of(token) < p_.page_table.max_pages;
    return wanted ? row_ + cell_of(token) : nullptr;
  }

  // All tiles of the piece that is open; `pages` are those of the lane's two rows of the first tile.
  template <class Piece>
  __device__ __forceinline__ void bring(const Piece& piece, int (&pages)[kHeld]) {
    const int tiles = num_tiles(piece);
    int token = piece.first_token() + first_row_ + lane_;
#pragma unroll 1
    for (int tile = 0; tile < tiles; ++tile, token += Tr::kTileTokens) {
      Rows rows;
      bool whole = true;
#pragma unroll
      for (int i = 0; i < kHeld; ++i) rows[i] = row_place(token + 32 * i, pages[i]);
      if (token + 32 * (kHeld - 1) >= first_draft_) hide_drafts(token, rows);
#pragma unroll
      for (int i = 0; i < kHeld; ++i) {
        whole = whole && rows[i] != kNowhere;
        pages[i] = page_of(token + Tr::kTileTokens + 32 * i);
      }
      hopper::mbarrier_wait(empty_ + place_.slot * 8, place_.parity ^ 1);
      const uint32_t to = destination_ + place_.slot * Tr::kUnitBytes;
      if (__all_sync(~0u, whole)) {
        copy_rows<true>(rows, to);
      } else {
        copy_rows<false>(rows, to);
      }
      hopper::arrive_after_copies(full_ + place_.slot * 8);
      place_.advance();
      place_.advance();
    }
  }

 private:
  static constexpr int kSize = sizeof(typename Tr::Element);
  static constexpr int kLanesPerRow = Tr::kHeadDim * kSize / 16;
  static constexpr int kRowsPerCopy = 32 / kLanesPerRow;
  static constexpr int kIdleLanes = 32 % kLanesPerRow;
  static constexpr uint32_t kNowhere = ~0u;
  using Rows = uint32_t[Tr::kTileTokens / Tr::kBringersOfUnit / 32];  // this lane's of a tile

  __device__ bool is_seen(int token) const { return token >= begin_token_ && token < end_token_; }

  // The page of a token, or its cell's: read well before it is needed. Cells of keys that no row sees may hold
  // anything.
  __device__ int page_of(int token) const { return is_seen(token) ? __ldg(row_ + cell_of(token)) : 0; }

  __device__ int cell_of(int token) const {
    return shape_.page_shift >= 0 ? token >> shape_.page_shift : shape_.by_page_size.divide(token);
  }

  __device__ uint32_t row_place(int token, int page) const {
    if (!is_seen(token) || !p_.page_table.has_page(page)) return kNowhere;
    const uint32_t in_page = token - cell_of(token) * p_.page_table.page_size;
    return static_cast<uint32_t>(page) * page_step_ + in_page * token_step_;
  }

  // Drafts of a tree that no row sees are nowhere, though their cells may be looked up.
  __device__ void hide_drafts(int token, Rows& rows) const {
#pragma unroll
    for (int i = 0; i < kHeld; ++i) {
      const int draft = token + 32 * i - first_draft_;
      if (rows[i] != kNowhere && draft >= 0 && !some_row_sees(TreeRules(p_), request_, draft)) rows[i] = kNowhere;
    }
  }

  // kWhole: all rows are seen.
  template <bool kWhole>
  __device__ __forceinline__ void copy_rows(const Rows& rows, uint32_t to) const {
#pragma unroll kWhole ? 8 : 1
    for (int first = 0; first < kRowsOfWarp; first += kRowsPerCopy) {
      const uint32_t at = __shfl_sync(~0u, first < 32 ? rows[0] : rows[kHeld - 1], first % 32 + lane_ / kLanesPerRow);
      const bool take = inside_ && (kWhole || at != kNowhere);
      if (kIdleLanes > 0 && lane_ >= 32 - kIdleLanes) continue;
      cp_async_16((to ^ (first % 8 << 4)) + first * 128, base_ + uint64_t{take ? at : 0} * 16, take);
    }
  }

  const Params& p_;
  const Shape& shape_;
  const bool values_;
  const int first_row_;  // of a tile, of those that this warp copies
  const uint32_t ring_, full_, empty_;
  const int lane_, column_;
  const uint32_t page_step_, token_step_;
  bool inside_;           // this lane's column is one of the rows'
  uint32_t destination_;  // of this lane's first copy, in the ring's first unit
  RingPlace<Tr> place_;
  int begin_token_ = 0, end_token_ = 0;
  int request_ = 0, first_draft_ = INT_MAX;
  const int32_t* row_ = nullptr;
  const char* base_ = nullptr;
};

}  // namespace attnops::xqa_decode::sm90
