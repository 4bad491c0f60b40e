#pragma once
#include <cstdint>

#include "core/report.h"
#include "device/sm90/barrier.cuh"
#include "mla_decode/sm90/pieces.cuh"
#include "mla_decode/sm90/quarters.h"
#include "mla_decode/sm90/read_ahead.cuh"

namespace attnops::mla_decode::sm90 {

// Where a loading warp's tokens are, for loaders whose four warps bring a quarter of each tile: in groups of eight by
// the copy engine ("boxed") where a page holds whole groups and the tile no key that may not be read, else row by row.
// Page indices are read ahead of their use. `Paging` has cell(key) and offset(key): a token's place in the page table
// and in its page.
template <class Paging>
class QuarterPages {
 protected:
  static constexpr int kTokens = kQuarterTokens;           // of a tile, per warp
  static constexpr int kTilesAhead = 32 / kGroupsPerWarp;  // whose page indices are read at once
  static constexpr int kUnknown = INT32_MIN;

  __device__ QuarterPages(const Params& p, const Paging& paging, bool use_boxes, int warp)
      : p_(p), paging_(paging), use_boxes_(use_boxes), warp_(warp), lane_(threadIdx.x % 32) {}

  // Whether a part's first pages can be told from the plan alone. Batch-invariant plans may pass over a request that
  // has more cuts than there is room for, so there the first piece is not known yet.
  __device__ bool may_speculate() const {
    return p_.window_left < 0 && !p_.page_table.kv_indptr && p_.fixed_split_tokens <= 0;
  }

  // Page indices of a part's first tiles, as row_page and group_page find them, asked for together with the length of
  // the request instead of after it. They are used only where the length allows.
  __device__ int speculate(int request, int first_tile) const {
    if (!may_speculate() || request >= p_.batch_size) return kUnknown;
    const int tile = first_tile + (use_boxes_ ? lane_ / kGroupsPerWarp : 0);
    const int token = use_boxes_ ? lane_ % kGroupsPerWarp * kGroupTokens : lane_ % kTokens;
    const int cell = paging_.cell(first_token(tile) + token);
    return cell < p_.page_table.max_pages ? read_ahead(p_.page_table.row(request) + cell) : 0;
  }

  // Calls, for each tile of a piece in turn, boxed(t, tile, pages, first_lane) with the pages of its groups in lanes
  // from first_lane, or gathered(tile, page) with that of row lane % 16. `first_page` is what `speculate` found. Where
  // no tree hides keys, kOptions says so: the call that asks a tree costs registers of every tile.
  template <Options kOptions = Options::kAll, class Boxed, class Gathered>
  __device__ void each_tile(const Piece& piece, int first_page, const Boxed& boxed, const Gathered& gathered) {
    const int32_t* cells = p_.page_table.row(piece.request);
    // Indices are read ahead: of the next gathered tile, one row a lane, and of 16 boxed tiles, one group a lane.
    int next_row = -1, groups = 0, next_groups = 0;
    if (first_page == kUnknown || use_boxes_) {
      next_row = row_page<kOptions>(piece, cells, 0);
    } else if (is_readable<kOptions>(p_, piece, first_token(piece.first_tile) + lane_ % kTokens)) {
      next_row = first_page;
    }
    if (use_boxes_) next_groups = first_page == kUnknown ? group_page<kOptions>(piece, cells, 0) : first_page;
    for (int t = 0; t < piece.num_tiles; ++t, ++count_) {
      const int tile = piece.first_tile + t, row = next_row;
      const bool is_boxed = sm90::is_boxed<kOptions>(p_, piece, tile, use_boxes_);
      if (t % kTilesAhead == 0) {
        groups = next_groups;
        if (use_boxes_) next_groups = group_page<kOptions>(piece, cells, t + kTilesAhead);
      }
      if (is_boxed) boxed(t, tile, groups, t % kTilesAhead * kGroupsPerWarp);
      next_row = row_page<kOptions>(piece, cells, t + 1);
      if (!is_boxed) gathered(tile, row);
    }
  }

  // Boxes of a tile's groups: bring(g, token of the page, page) for each, when the slot is free. That barrier lies
  // behind `full`; `parity` is of its round.
  template <int kBytes, class Bring>
  __device__ void bring_groups(int tile, int pages, int first_lane, uint32_t full, uint32_t parity,
                               const Bring& bring) const {
    int page[kGroupsPerWarp];
#pragma unroll
    for (int g = 0; g < kGroupsPerWarp; ++g) page[g] = __shfl_sync(0xffffffffu, pages, first_lane + g);
    // By every lane: an arrival before the slot is empty would count for the tile that is still in it.
    attnops::sm90::mbarrier_wait(full + 8, parity ^ 1);
    if (lane_ == 0) {
      attnops::sm90::mbarrier_arrive_expect(full, kBytes);
#pragma unroll
      for (int g = 0; g < kGroupsPerWarp; ++g) {
        bring(g, paging_.offset(first_token(tile) + g * kGroupTokens), page[g]);
      }
    } else {
      attnops::sm90::mbarrier_arrive(full);
    }
    __syncwarp();
  }

  __device__ int first_token(int tile) const { return tile * kPlanTileTokens + warp_ * kTokens; }

  // Of lists: the index of row lane % 16 of tile t + lane / 16; -1 where there is no key. Of one list,
  __device__ int listed_row(const Piece& piece, int t) const {
    t += lane_ / kTokens;
    const int key = first_token(piece.first_tile + t) + lane_ % kTokens;
    return t < piece.num_tiles && key < piece.keys.end ? p_.selected.list(piece.request)[key] : -1;
  }
  // or of two.
  __device__ int listed_row(const Piece& piece, const ListKeys& keys, int t) const {
    t += lane_ / kTokens;
    const int key = first_token(piece.first_tile + t) + lane_ % kTokens;
    if (t >= piece.num_tiles) return -1;
    if (key < keys.first) return p_.selected.list(piece.request)[key];
    return key >= keys.second && key < keys.end ? p_.extra.list(piece.request)[key - keys.second] : -1;
  }

  // Calls, for each tile of a piece in turn, bring(row) or bring(is_extra, row) with the index of row lane % 16. An
  // index a lane, of two tiles at a time, and those of the next two are on their way.
  template <class Bring>
  __device__ void each_listed(const Piece& piece, const Bring& bring) {
    int next = listed_row(piece, 0), rows = 0;
    for (int t = 0; t < piece.num_tiles; ++t, ++count_) {
      if (t % 2 == 0) {
        rows = next;
        next = listed_row(piece, t + 2);
      }
      const int row = __shfl_sync(0xffffffffu, rows, t % 2 * kTokens + lane_ % kTokens);
      if (p_.report) check_row(piece, first_token(piece.first_tile + t) + lane_ % kTokens, row);
      bring(row);
    }
  }

  // The same of two lists: no tile has keys of both.
  template <class Bring>
  __device__ void each_listed(const Piece& piece, const ListKeys& keys, const Bring& bring) {
    int next = listed_row(piece, keys, 0), rows = 0;
    for (int t = 0; t < piece.num_tiles; ++t, ++count_) {
      if (t % 2 == 0) {
        rows = next;
        next = listed_row(piece, keys, t + 2);
      }
      const int row = __shfl_sync(0xffffffffu, rows, t % 2 * kTokens + lane_ % kTokens);
      const int key = first_token(piece.first_tile + t) + lane_ % kTokens;
      const bool is_extra = keys.is_extra(key);
      if (p_.report) check_row(piece, key, is_extra, key - keys.begin_of(is_extra), row);
      bring(is_extra, row);
    }
  }

  // Checked mode: a row of a page that does not exist is reported, once, and left out.
  __device__ void check_page(const Piece& piece, int key, int& page) const {
    if (!is_readable(p_, piece, key) || p_.page_table.has_page(page)) return;
    const int cell = paging_.cell(key);
    if (lane_ < kTokens) report(ReportKind::kPageIndex, piece.request, cell, page, p_.page_table.num_pages);
    page = -1;
  }

  __device__ void check_length(const Piece& piece) const {
    if (p_.report == nullptr || warp_ + lane_ != 0) return;
    check_table_length(p_, piece);
  }

  const Params& p_;
  const Paging paging_;
  const bool use_boxes_;
  const int warp_, lane_;
  int count_ = 0;  // tiles of the ring so far

 private:
  // Checked mode, of lists: what is past the pool. It is left out in any case.
  __device__ void check_row(const Piece& piece, int key, bool is_extra, int position, int row) const {
    const int64_t num_rows = is_extra ? p_.extra.num_rows : p_.selected.num_rows;
    if (lane_ >= kTokens || !is_readable(p_, piece, key) || row < num_rows) return;
    const ReportKind kind = is_extra ? kReportExtraRowIndex : kReportRowIndex;
    record_fault(p_.report, {p_.report_op, kind, piece.request, position, row, num_rows});
  }
  __device__ void check_row(const Piece& piece, int key, int row) const { check_row(piece, key, false, key, row); }

  // The page of row lane % 16 of this warp's part of a gathered tile; -1 where there is nothing to read.
  template <Options kOptions>
  __device__ int row_page(const Piece& piece, const int32_t* cells, int t) const {
    const int tile = piece.first_tile + t, key = first_token(tile) + lane_ % kTokens;
    const bool needed = t < piece.num_tiles && !is_boxed<kOptions>(p_, piece, tile, use_boxes_) &&
                        is_readable<kOptions>(p_, piece, key);
    return needed ? cells[paging_.cell(key)] : -1;
  }

  // The page of group lane % kGroupsPerWarp of tile t + lane / kGroupsPerWarp.
  template <Options kOptions>
  __device__ int group_page(const Piece& piece, const int32_t* cells, int t) const {
    t += lane_ / kGroupsPerWarp;
    const int tile = piece.first_tile + t, key = first_token(tile) + lane_ % kGroupsPerWarp * kGroupTokens;
    const bool needed = t < piece.num_tiles && is_boxed<kOptions>(p_, piece, tile, use_boxes_);
    return needed ? cells[paging_.cell(key)] : 0;
  }

  __device__ void report(ReportKind kind, int request, int position, int64_t value, int64_t limit) const {
    record_fault(p_.report, {ReportOp::kMlaDecode, kind, request, position, value, limit});
  }
};

}  // namespace attnops::mla_decode::sm90
