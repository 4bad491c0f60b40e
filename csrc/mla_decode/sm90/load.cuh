#pragma once
#include "core/report.h"
#include "mla_decode/sm90/first_loads.cuh"
#include "mla_decode/sm90/load_boxes.cuh"

// What the loading warpgroup does: queries and KV tiles of every piece into shared memory, each part as soon as the
// consumers have given its place back. A tile whose 64 keys are one run of a page comes as boxes of the copy engine,
// any other row by row.
//
// Common calls bring a request's last tile as all others; what lies behind its keys is of no meaning, and the consumers
// clear it. Otherwise keys that nobody may read come as zeros. Either way 0 x NaN never happens.
namespace attnops::mla_decode::sm90 {

// How tiles come: all row by row; by boxes; or as Modes say, also by boxes of pages smaller than a tile. Code for what
// a call does not do is left out: it costs also where it is jumped over.
enum class Loads { kGathered, kBoxes, kAny };

// One of the four loading warps. Each serves one half of the columns of one of the two KV buffers, by itself: a warp
// that served more would sit in one wait while another place falls free.
template <Options kOptions, Loads kLoads>
class Loader : BoxLoads {
 public:
  __device__ Loader(const Params& p, const Maps& maps, const Modes& modes, const SplitKvEntry& entry, uint8_t* base,
                    uint32_t shared)
      // Without a plan, in prefill, tokens share rows.
      : BoxLoads(p, maps, modes, base, shared, !selects(kOptions) || p.tile_scheduler_metadata), entry_(entry) {}

  __device__ void run() {
    if constexpr (kLoads == Loads::kBoxes) ask_first_loads();
    if constexpr (selects(kOptions)) clear_rope();
    PieceWalkFor<kOptions> walk(entry_);
    int first_pages = speculate();
    Piece piece;
    const auto pass = [&] {
      if constexpr (kPassesKeyless<kOptions>) store_zeros(piece);
      return kPassesKeyless<kOptions>;
    };
    for (int count = 0; walk.next(p_, piece, pass); ++count) {
      check_length(piece);
      load_queries(piece, count);
      load_tiles(piece, count, first_pages);
      first_pages = kUnknown;
    }
    asm volatile("cp.async.wait_all;" ::: "memory");
  }

 private:
  static constexpr int kUnknown = INT32_MIN;
  static constexpr bool kWhole = kOptions == Options::kCommon;  // tiles never come row by row for their last keys

  __device__ void ask_first_loads() {
    int* asked = reinterpret_cast<int*>(base_ + kAsked);
    if (warp_ == 0) {
      const int value = ask_first(p_, maps_, modes_, entry_, shared_);
      if (lane_ == 0) *asked = value;
    }
    attnops::sm90::named_barrier_sync(kAskedKnown, kGroupThreads);
    asked_ = *asked;
  }

  // The rows of a work without keys, of common calls: a warp has each fourth. It would wait for the places of what
  // comes next otherwise.
  __device__ void store_zeros(const Piece& piece) const {
#pragma unroll 1
    for (int row = warp_; row < piece.num_rows; row += 4) {
      const RowPlace at = row_place(p_, piece.first_row + row);
      auto* out =
          static_cast<uint8_t*>(p_.out) + kElement * (piece.request * p_.out_stride_request +
                                                      at.token * p_.out_stride_token + at.head * p_.out_stride_head);
      for (int i = 0; i < 2; ++i) reinterpret_cast<uint4*>(out)[lane_ + 32 * i] = {};
      if (lane_ == 0 && p_.lse) {
        p_.lse[(static_cast<int64_t>(piece.request) * p_.seqlen_q + at.token) * p_.num_q_heads + at.head] = -INFINITY;
      }
    }
  }

  // Every second tile of the piece. Pages are looked up before they are needed.
  __device__ void load_tiles(const Piece& piece, int count, int first_pages) {
    const int32_t* cells = p_.page_table.row(piece.request);
    if constexpr (kOptions == Options::kMasked) {
      load_listed_tiles<false>(piece, count);
    } else if constexpr (kOptions == Options::kSelected) {
      if (p_.extra.count > 0) {
        load_listed_tiles<true>(piece, count);
      } else {
        load_listed_tiles<false>(piece, count);
      }
    } else if (kLoads == Loads::kBoxes || (kLoads == Loads::kAny && modes_.use_boxes)) {
      load_boxed_tiles(piece, cells, count, first_pages);
    } else {
      load_gathered_tiles(piece, cells, count);
    }
  }

  __device__ void load_boxed_tiles(const Piece& piece, const int32_t* cells, int count, int first_pages) {
    int boxes = first_pages == kUnknown ? box_pages(piece, cells, 0) : first_pages;
    int next_boxes = box_pages(piece, cells, steps_ahead());
    // Behind boxes comes one tile at most that is not read whole, the last, and under a window one before them.
    int pages[kRowsPerLane];
    int pages_of = boxed(piece, buffer_) ? buffer_ + (piece.num_tiles - 1 - buffer_) / 2 * 2 : buffer_;
    if constexpr (!kWhole) row_pages(piece, cells, pages_of, pages);
    let_even_tile_go_first(count);
    for (int t = buffer_; t < piece.num_tiles; t += 2) {
      const int step = t / 2, lane = (step << box_shift()) % 32;
      if (lane == 0 && step > 0) {
        boxes = next_boxes;
        next_boxes = box_pages(piece, cells, step + steps_ahead());
      }
      const bool half = kWhole && fits_half(keys_left(piece, t));
      if (!boxed(piece, t)) {
        if constexpr (!kWhole) {
          if (pages_of != t) row_pages(piece, cells, t, pages);
          gather_some(piece, t, pages);
        }
      } else if (asked_ & kAskedEven << buffer_) {
        asked_ &= ~(kAskedEven << buffer_);
      } else if (box_shift() == 0) {
        load_boxes(piece.first_tile + t, __shfl_sync(0xffffffffu, boxes, lane), half);
      } else {
        load_small_boxes(boxes, lane, (1 << box_shift()) >> half);
      }
      empty_parity_ ^= 1;
      if (t == 0) let_odd_tiles_begin(count);
    }
  }

  // Both warps of a buffer copy half of the rows of a whole tile: what limits a warp is its own rate of copies.
  __device__ void load_gathered_tiles(const Piece& piece, const int32_t* cells, int count) {
    list_row(piece, buffer_, half_page(piece, cells, buffer_));
    let_even_tile_go_first(count);
    for (int t = buffer_; t < piece.num_tiles; t += 2) {
      int page;
      if (kWhole || is_complete(piece, t)) {
        copy_half(own_pool(), !kWhole || keys_left(piece, t) > warp_ % 2 * kHalfRows);
        page = half_page(piece, cells, t + 2);
        hand_over_half();
      } else {
        int pages[kRowsPerLane];
        row_pages(piece, cells, t, pages);
        gather_some(piece, t, pages);
        page = half_page(piece, cells, t + 2);
      }
      list_row(piece, t + 2, page);
      empty_parity_ ^= 1;
      if (t == 0) let_odd_tiles_begin(count);
    }
  }

  // Rows of 512 values have no rope part. They are multiplied as if it were zeros, which nobody overwrites.
  __device__ bool with_rope() const { return !p_.shared_rows; }

  __device__ void clear_rope() const {
    if (with_rope() || !has_rope()) return;
    uint8_t* tile = base_ + kKv + buffer_ * kOperandBytes + kRopeTile * kTileBytes;
#pragma unroll 1
    for (int i = lane_ * 16; i < kTileBytes; i += 32 * 16) *reinterpret_cast<uint4*>(tile + i) = {};
  }

  // Of lists: the pool of a tile, and where its rows are. kTwo: of either list, for no tile has keys of both.
  template <bool kTwo>
  struct TileRows {
    const bool is_extra;
    const SelectedRows& pool;
    const Divisor& by_page_size;
    const RowUnits& units;

    __device__ TileRows(const Params& p, const Modes& modes, bool extra)
        : is_extra(kTwo && extra),
          pool(is_extra ? p.extra : p.selected),
          by_page_size(is_extra ? modes.by_extra_size : modes.by_page_size),
          units(is_extra ? modes.extra_units : modes.units) {}

    __device__ Pool source() const { return {static_cast<const uint8_t*>(pool.pages), units.bytes}; }
    __device__ uint32_t place(int row) const {
      const int page = by_page_size.divide(row);
      return page * units.per_page + (row - page * pool.page_size) * units.per_token;
    }
  };

  // The same of rows that a list names. Where one of a tile's 64 is no key, both warps bring zeros for it.
  template <bool kTwo>
  __device__ void load_listed_tiles(const Piece& piece, int count) {
    const ListKeys keys(p_.selected, p_.extra, piece.request);
    int next[kRowsPerLane];
    uint32_t next_masks[kRowsPerLane] = {};
    listed_rows<kTwo>(piece, keys, buffer_, next);
    if constexpr (kOptions == Options::kMasked) listed_masks(piece, buffer_, next_masks);
    let_even_tile_go_first(count);
    for (int t = buffer_; t < piece.num_tiles; t += 2) {
      const TileRows<kTwo> from(p_, modes_, keys.is_extra((piece.first_tile + t) * kPlanTileTokens));
      int rows[kRowsPerLane];
      uint32_t there[kRowsPerLane];
#pragma unroll
      for (int i = 0; i < kRowsPerLane; ++i) {
        rows[i] = next[i] < from.pool.num_rows ? next[i] : -1;
        there[i] = __ballot_sync(0xffffffffu, rows[i] >= 0);
      }
      if (p_.report && has_rope()) report_rows(piece, keys, from, t, next);
      // By the warp whose part is given back by the group that reads it.
      uint32_t masks_there[kRowsPerLane] = {};
      if constexpr (kOptions == Options::kMasked) {
#pragma unroll
        for (int i = 0; i < kRowsPerLane; ++i) masks_there[i] = rows[i] < 0 ? 0 : next_masks[i];
        listed_masks(piece, t + 2, next_masks);
      }
      const auto tell = [&] {
        if constexpr (kOptions == Options::kMasked) {
          if (has_rope()) tell_masks(masks_there);
          return;
        }
        auto* masks = reinterpret_cast<volatile uint64_t*>(base_ + kKeyMasks) + buffer_;
        if (has_rope() && lane_ == 0) *masks = there[0] | static_cast<uint64_t>(there[1]) << 32;
      };
      if (from.units.bytes != 0 && (there[0] & there[1]) == 0xffffffffu) {
        write_row_list(from.place(warp_ % 2 == 0 ? rows[0] : rows[1]));
        copy_half(from.source(), true, with_rope());
        tell();
        listed_rows<kTwo>(piece, keys, t + 2, next);
        hand_over_half();
      } else {
        int64_t offset[kRowsPerLane];
#pragma unroll
        for (int i = 0; i < kRowsPerLane; ++i) offset[i] = rows[i] < 0 ? -1 : kElement * from.pool.offset(rows[i]);
        listed_rows<kTwo>(piece, keys, t + 2, next);
        gather_rows(from.source(), offset, tell, with_rope());
      }
      empty_parity_ ^= 1;
      if (t == 0) let_odd_tiles_begin(count);
    }
  }

  // Of this lane's keys of a tile, lane and lane + 32, as the list has them; -1 behind its end. Nobody waits for them
  // here.
  template <bool kTwo>
  __device__ void listed_rows(const Piece& piece, const ListKeys& keys, int t, int (&rows)[kRowsPerLane]) const {
    const int first_key = (piece.first_tile + t) * kPlanTileTokens;
    const bool is_extra = kTwo && keys.is_extra(first_key);
    const int32_t* list = (is_extra ? p_.extra : p_.selected).list(piece.request);
    const int begin = first_key - keys.begin_of(is_extra), end = kTwo ? keys.end_of(is_extra) : piece.keys.end;
#pragma unroll
    for (int i = 0; i < kRowsPerLane; ++i) {
      const int at = lane_ + 32 * i;
      rows[i] = t < piece.num_tiles && first_key + at < end ? list[begin + at] : -1;
    }
  }

  // Which groups of heads see them.
  __device__ void listed_masks(const Piece& piece, int t, uint32_t (&masks)[kRowsPerLane]) const {
    if (!has_rope()) return;
    const int first_key = (piece.first_tile + t) * kPlanTileTokens;
    const HeadMasks of(p_);
    const uint8_t* list = of.bits + piece.request * of.stride + first_key;
#pragma unroll
    for (int i = 0; i < kRowsPerLane; ++i) {
      const int at = lane_ + 32 * i;
      masks[i] = t < piece.num_tiles && first_key + at < piece.keys.end ? list[at] : 0;
    }
  }

  // A word of keys for each group of heads.
  __device__ void tell_masks(const uint32_t (&masks)[kRowsPerLane]) const {
    auto* words = reinterpret_cast<volatile uint64_t*>(base_ + kHeadMasks) + buffer_ * kMostHeadGroups;
#pragma unroll
    for (int group = 0; group < kMostHeadGroups; ++group) {
      const uint32_t low = __ballot_sync(0xffffffffu, masks[0] >> group & 1);
      const uint32_t high = __ballot_sync(0xffffffffu, masks[1] >> group & 1);
      if (lane_ == 0) words[group] = low | static_cast<uint64_t>(high) << 32;
    }
  }

  // Checked mode.
  template <bool kTwo>
  __device__ void report_rows(const Piece& piece, const ListKeys& keys, const TileRows<kTwo>& from, int t,
                              const int (&rows)[kRowsPerLane]) const {
    const int64_t num_rows = from.pool.num_rows;
    const ReportKind kind = from.is_extra ? kReportExtraRowIndex : kReportRowIndex;
#pragma unroll
    for (int i = 0; i < kRowsPerLane; ++i) {
      if (rows[i] < num_rows) continue;
      const int key = (piece.first_tile + t) * kPlanTileTokens + lane_ + 32 * i;
      record_fault(p_.report,
                   {p_.report_op, kind, piece.request, key - keys.begin_of(from.is_extra), rows[i], num_rows});
    }
  }

  // At the very start odd tiles stand back for the even one: all queue at one copy engine, and scores begin with it.
  __device__ void let_even_tile_go_first(int count) const {
    if (count == 0 && buffer_ == 1) attnops::sm90::named_barrier_sync(kFirstTile, kGroupThreads);
  }

  __device__ void let_odd_tiles_begin(int count) const {
    if (count == 0) attnops::sm90::named_barrier_arrive(kFirstTile, kGroupThreads);
  }

  // Keys of the request from the tile's first one on.
  __device__ int keys_left(const Piece& piece, int t) const {
    return piece.keys.end - (piece.first_tile + t) * kPlanTileTokens;
  }

  __device__ bool boxed(const Piece& piece, int t) const {
    return kWhole || is_boxed<kOptions>(p_, piece, piece.first_tile + t, modes_.use_boxes);
  }

  __device__ bool readable(const Piece& piece, int key) const { return is_readable<kOptions>(p_, piece, key); }

  // Pages of this lane's rows of a gathered tile; -1 where there is nothing to read.
  __device__ void row_pages(const Piece& piece, const int32_t* cells, int t, int (&page)[kRowsPerLane]) const {
    const int tile = piece.first_tile + t;
    const bool needed = t < piece.num_tiles && !boxed(piece, t);
#pragma unroll
    for (int i = 0; i < kRowsPerLane; ++i) {
      const int key = tile * kPlanTileTokens + lane_ + 32 * i;
      page[i] = -1;
      if (needed && readable(piece, key)) page[i] = cells[page_cell(key)];
    }
  }

  // A tile comes as 2^box_shift boxes.
  __device__ int box_shift() const { return kLoads == Loads::kAny ? modes_.box_shift : 0; }

  // Steps whose pages are read at once, one a lane.
  __device__ int steps_ahead() const { return 32 >> box_shift(); }

  // The pages of this buffer's tiles from `step` on, one a lane. A page that does not exist comes as zeros.
  __device__ int box_pages(const Piece& piece, const int32_t* cells, int step) const {
    const int t = buffer_ + 2 * (step + (lane_ >> box_shift())), tile = piece.first_tile + t;
    if constexpr (kWhole) {
      const int box = lane_ & ((1 << box_shift()) - 1);
      const bool has_keys = t < piece.num_tiles && keys_left(piece, t) > box * (kPlanTileTokens >> box_shift());
      return has_keys ? cells[cell_of(tile)] : -1;
    }
    const bool needed = t < piece.num_tiles && boxed(piece, t);
    return needed ? cells[cell_of(tile)] : 0;
  }

  // Of this lane's box of a tile.
  __device__ int cell_of(int tile) const {
    if (modes_.tiles_per_page > 1) return tile / modes_.tiles_per_page;
    return (tile << box_shift()) + (lane_ & ((1 << box_shift()) - 1));
  }

  // The pages of the part's first boxes, asked for together with the request's length instead of after it. They are
  // used only where the length allows. Batch-invariant plans may pass over a request that has more cuts than there is
  // room for, so there the first piece is not known yet.
  __device__ int speculate() const {
    if (kLoads == Loads::kGathered || !modes_.use_boxes || p_.fixed_split_tokens > 0) return kUnknown;
    if (window_of<kOptions>(p_) >= 0 || p_.page_table.kv_indptr) return kUnknown;
    const int request = block_place(p_, entry_.begin_work).request;
    if (request >= p_.batch_size) return kUnknown;
    const int cell = cell_of(entry_.begin_tile + buffer_ + 2 * (lane_ >> box_shift()));
    return cell < p_.page_table.max_pages ? p_.page_table.row(request)[cell] : 0;
  }

  // Where a row begins, in bytes from the pool, or -1.
  __device__ int64_t row_offset(int key, int page) const {
    if (!p_.page_table.has_page(page)) return -1;
    return kElement * (page * p_.kv_stride_page + static_cast<int64_t>(token_of(key)) * p_.kv_stride_token);
  }

  // Whether all keys of a tile may be read, and their rows' places fit 32 bits.
  __device__ bool is_complete(const Piece& piece, int t) const {
    if (kOptions == Options::kAll && p_.report) return false;
    return modes_.units.bytes != 0 && is_boxed<kOptions>(p_, piece, piece.first_tile + t, true);
  }

  // This lane's row of the warp's half of a tile.
  __device__ int half_key(const Piece& piece, int t) const {
    return (piece.first_tile + t) * kPlanTileTokens + warp_ % 2 * kHalfRows + lane_;
  }

  __device__ int half_page(const Piece& piece, const int32_t* cells, int t) const {
    const int key = half_key(piece, t);
    return t < piece.num_tiles && readable(piece, key) ? cells[page_cell(key)] : 0;
  }

  __device__ void list_row(const Piece& piece, int t, int page) const {
    if (!p_.page_table.has_page(page)) page = 0;  // no row of a page that does not exist; of another one, nobody minds
    write_row_list(page * modes_.units.per_page + token_of(half_key(piece, t)) * modes_.units.per_token);
  }

  // A tile with keys that may not be read: zeros.
  __device__ void gather_some(const Piece& piece, int t, int (&page)[kRowsPerLane]) const {
    const int tile = piece.first_tile + t;
    if (kOptions == Options::kAll && p_.report) check_pages(piece, tile, page);
    int64_t offset[kRowsPerLane];
#pragma unroll
    for (int i = 0; i < kRowsPerLane; ++i) offset[i] = row_offset(tile * kPlanTileTokens + lane_ + 32 * i, page[i]);
    gather_rows(own_pool(), offset, [] {});
  }

  __device__ void load_queries(const Piece& piece, int count) const {
    if (kOptions == Options::kCommon || modes_.queries_by_map) {
      // By a warp whose own first place, of an odd tile, is not free earlier than that of the queries.
      if (warp_ == 3 && lane_ == 0 && !(count == 0 && asked_ & kAskedQueries)) {
        mbarrier_wait(shared_ + kQueriesEmpty, (count & 1) ^ 1);
        if constexpr (kOptions == Options::kSelected) {
          copy_latent_queries(maps_, shared_, piece.request, piece.first_row);
          mbarrier_wait(shared_ + kQueriesRopeEmpty, (count & 1) ^ 1);
          copy_rope_queries(p_, maps_, shared_, piece.request, piece.first_row);
        } else {
          copy_queries(p_, maps_, shared_, piece.request, piece.first_row);
        }
      }
      __syncwarp();
      return;
    }
    mbarrier_wait(shared_ + kQueriesEmpty, (count & 1) ^ 1);
    if constexpr (kOptions == Options::kSelected) mbarrier_wait(shared_ + kQueriesRopeEmpty, (count & 1) ^ 1);
#pragma unroll 1
    for (int i = 0; i < 4; ++i) {
      const int row = 16 * warp_ + 4 * i + lane_ / 8, chunk = lane_ % 8;
      const bool valid = row < piece.num_rows;
      const RowPlace at = row_place(p_, piece.first_row + (valid ? row : 0));
      const auto* q =
          static_cast<const uint8_t*>(p_.q) +
          kElement * (piece.request * p_.q_stride_request + at.token * p_.q_stride_token + at.head * p_.q_stride_head);
      const auto* rope = q + kHeadDimV * kElement;
      if (p_.q_pe) {
        rope = static_cast<const uint8_t*>(p_.q_pe) +
               kElement * (piece.request * p_.q_pe_stride_request + at.token * p_.q_pe_stride_token +
                           at.head * p_.q_pe_stride_head);
      }
      const uint32_t place = shared_ + kQ + attnops::sm90::swizzled(row, chunk);
#pragma unroll
      for (int k = 0; k < kTilesV; ++k) {
        attnops::sm90::copy16(place + k * kTileBytes, q + k * 128 + chunk * 16, valid);
      }
      const bool has_rope_part = !selects(kOptions) || with_rope();
      attnops::sm90::copy16(place + kRopeTile * kTileBytes, rope + chunk * 16, valid && has_rope_part);
    }
    attnops::sm90::arrive_after_copies(shared_ + kQueriesFull);
  }

  // Checked mode: a row of a page that does not exist is reported, once, and left out.
  __device__ void check_pages(const Piece& piece, int tile, int (&page)[kRowsPerLane]) const {
#pragma unroll
    for (int i = 0; i < kRowsPerLane; ++i) {
      const int key = tile * kPlanTileTokens + lane_ + 32 * i;
      if (!readable(piece, key) || p_.page_table.has_page(page[i])) continue;
      const int cell = key / p_.page_table.page_size;
      if (has_rope()) report(ReportKind::kPageIndex, piece.request, cell, page[i], p_.page_table.num_pages);
      page[i] = -1;
    }
  }

  __device__ void check_length(const Piece& piece) const {
    if (kOptions == Options::kCommon || p_.report == nullptr || warp_ + lane_ != 0) return;
    if constexpr (selects(kOptions)) return check_list_lengths(p_, piece);
    check_table_length(p_, piece);
  }

  __device__ void report(ReportKind kind, int request, int position, int64_t value, int64_t limit) const {
    record_fault(p_.report, {ReportOp::kMlaDecode, kind, request, position, value, limit});
  }

  const SplitKvEntry& entry_;
  int asked_ = 0;  // Asked, of what is not yet passed over
};

}  // namespace attnops::mla_decode::sm90
