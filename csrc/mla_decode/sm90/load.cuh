#pragma once
#include "core/report.h"
#include "device/sm90/barrier.cuh"
#include "device/sm90/copy.cuh"
#include "device/sm90/wgmma.cuh"
#include "mla_decode/sm90/first_loads.cuh"
#include "mla_decode/sm90/layout.h"
#include "mla_decode/sm90/modes.h"
#include "mla_decode/sm90/pieces.cuh"

// What the loading warpgroup does: queries and KV tiles of every piece into shared memory, each part as soon as the
// consumers have given its place back. A tile whose 64 keys are one run of a page comes as boxes of the copy engine,
// any other row by row, so that keys nobody may read become zeros and 0 x NaN never happens.
namespace attnops::mla_decode::sm90 {

using attnops::sm90::mbarrier_wait;

// How tiles come: all row by row; by boxes, but for those that are not read whole; or as Modes say, also by boxes of
// pages smaller than a tile. Code for what a call does not do is left out: it costs also where it is jumped over.
enum class Loads { kGathered, kBoxes, kAny };

// One of the four loading warps. Each serves one half of the columns of one of the two KV buffers, by itself: a warp
// that served more would sit in one wait while another place falls free.
template <Options kOptions, Loads kLoads>
class Loader {
 public:
  __device__ Loader(const Params& p, const Maps& maps, const Modes& modes, const SplitKvEntry& entry, uint8_t* base,
                    uint32_t shared)
      : p_(p),
        maps_(maps),
        modes_(modes),
        entry_(entry),
        base_(base),
        shared_(shared),
        warp_(threadIdx.x % kGroupThreads / 32),
        lane_(threadIdx.x % 32),
        buffer_(warp_ / 2),
        part_(warp_ == 0 || warp_ == 3 ? kPartLeft : kPartRight) {}

  __device__ void run() {
    if constexpr (kLoads == Loads::kBoxes) ask_first_loads();
    PieceWalkFor<kOptions> walk(entry_);
    int first_pages = speculate();
    Piece piece;
    for (int count = 0; walk.next(p_, piece); ++count) {
      check_length(piece);
      load_queries(piece, count);
      load_tiles(piece, count, first_pages);
      first_pages = kUnknown;
    }
    asm volatile("cp.async.wait_all;" ::: "memory");
  }

 private:
  static constexpr int kElement = 2;
  static constexpr int kRowsPerLane = 2;           // of a gathered tile: lane and lane + 32
  static constexpr int kHalfRows = 32;             // of a whole tile, by each of a buffer's two warps
  static constexpr int kRowSteps = kHalfRows / 4;  // of four rows, which a warp copies at once
  static constexpr int kUnknown = INT32_MIN;

  __device__ void ask_first_loads() {
    int* asked = reinterpret_cast<int*>(base_ + kAsked);
    if (warp_ == 0) {
      const int value = ask_first(p_, maps_, modes_, entry_, shared_);
      if (lane_ == 0) *asked = value;
    }
    attnops::sm90::named_barrier_sync(kAskedKnown, kGroupThreads);
    asked_ = *asked;
  }

  // Every second tile of the piece. Pages are looked up before they are needed.
  __device__ void load_tiles(const Piece& piece, int count, int first_pages) {
    const int32_t* cells = p_.page_table.row(piece.request);
    if constexpr (kOptions == Options::kSelected) {
      load_listed_tiles(piece, cells, count);
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
    row_pages(piece, cells, pages_of, pages);
    let_even_tile_go_first(count);
    for (int t = buffer_; t < piece.num_tiles; t += 2) {
      const int step = t / 2, lane = (step << box_shift()) % 32;
      if (lane == 0 && step > 0) {
        boxes = next_boxes;
        next_boxes = box_pages(piece, cells, step + steps_ahead());
      }
      if (!boxed(piece, t)) {
        if (pages_of != t) row_pages(piece, cells, t, pages);
        gather_some(piece, t, pages);
      } else if (asked_ & kAskedEven << buffer_) {
        asked_ &= ~(kAskedEven << buffer_);
      } else if (box_shift() == 0) {
        load_boxes(piece.first_tile + t, __shfl_sync(0xffffffffu, boxes, lane));
      } else {
        load_small_boxes(boxes, lane);
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
      if (is_complete(piece, t)) {
        copy_half();
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

  // The same of rows that a list names. Where one of a tile's 64 is no key, both warps bring zeros for it.
  __device__ void load_listed_tiles(const Piece& piece, const int32_t* list, int count) {
    int next[kRowsPerLane];
    listed_rows(piece, list, buffer_, next);
    let_even_tile_go_first(count);
    for (int t = buffer_; t < piece.num_tiles; t += 2) {
      int rows[kRowsPerLane];
      uint32_t there[kRowsPerLane];
#pragma unroll
      for (int i = 0; i < kRowsPerLane; ++i) {
        rows[i] = next[i] < p_.selected.num_rows ? next[i] : -1;
        there[i] = __ballot_sync(0xffffffffu, rows[i] >= 0);
      }
      if (p_.report && has_rope()) report_rows(piece, t, next);
      // By the warp whose part is given back by the group that reads it.
      const auto tell = [&] {
        auto* masks = reinterpret_cast<volatile uint64_t*>(base_ + kKeyMasks) + buffer_;
        if (has_rope() && lane_ == 0) *masks = there[0] | static_cast<uint64_t>(there[1]) << 32;
      };
      if (modes_.units.bytes != 0 && (there[0] & there[1]) == 0xffffffffu) {
        write_row_list(units_of_row(rows[warp_ % 2]));
        copy_half();
        tell();
        listed_rows(piece, list, t + 2, next);
        hand_over_half();
      } else {
        int64_t offset[kRowsPerLane];
#pragma unroll
        for (int i = 0; i < kRowsPerLane; ++i) offset[i] = rows[i] < 0 ? -1 : kElement * p_.selected.offset(rows[i]);
        listed_rows(piece, list, t + 2, next);
        gather_rows(offset, tell);
      }
      empty_parity_ ^= 1;
      if (t == 0) let_odd_tiles_begin(count);
    }
  }

  // Of this lane's keys of a tile, lane and lane + 32, as the list has them; -1 behind its end. Nobody waits for them
  // here.
  __device__ void listed_rows(const Piece& piece, const int32_t* list, int t, int (&rows)[kRowsPerLane]) const {
#pragma unroll
    for (int i = 0; i < kRowsPerLane; ++i) {
      const int key = (piece.first_tile + t) * kPlanTileTokens + lane_ + 32 * i;
      rows[i] = t < piece.num_tiles && key < piece.keys.end ? list[key] : -1;
    }
  }

  // Checked mode.
  __device__ void report_rows(const Piece& piece, int t, const int (&rows)[kRowsPerLane]) const {
#pragma unroll
    for (int i = 0; i < kRowsPerLane; ++i) {
      if (rows[i] < p_.selected.num_rows) continue;
      const int key = (piece.first_tile + t) * kPlanTileTokens + lane_ + 32 * i;
      record_fault(p_.report, {p_.report_op, kReportRowIndex, piece.request, key, rows[i], p_.selected.num_rows});
    }
  }

  __device__ uint32_t units_of_row(int row) const {
    const int page = modes_.by_page_size.divide(row);
    return page * modes_.units.per_page + (row - page * p_.selected.page_size) * modes_.units.per_token;
  }

  // At the very start odd tiles stand back for the even one: all queue at one copy engine, and scores begin with it.
  __device__ void let_even_tile_go_first(int count) const {
    if (count == 0 && buffer_ == 1) attnops::sm90::named_barrier_sync(kFirstTile, kGroupThreads);
  }

  __device__ void let_odd_tiles_begin(int count) const {
    if (count == 0) attnops::sm90::named_barrier_arrive(kFirstTile, kGroupThreads);
  }

  __device__ bool boxed(const Piece& piece, int t) const {
    return is_boxed<kOptions>(p_, piece, piece.first_tile + t, modes_.use_boxes);
  }

  __device__ bool has_rope() const { return warp_ % 2 == 0; }  // with the half that is given back first

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

  // The pages of this buffer's tiles from `step` on, one a lane.
  __device__ int box_pages(const Piece& piece, const int32_t* cells, int step) const {
    const int t = buffer_ + 2 * (step + (lane_ >> box_shift())), tile = piece.first_tile + t;
    const bool needed = t < piece.num_tiles && boxed(piece, t);
    return needed ? cells[cell_of(tile)] : 0;
  }

  __device__ int page_cell(int key) const { return modes_.by_page_size.divide(key); }
  __device__ int token_of(int key) const { return key - page_cell(key) * p_.page_table.page_size; }

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

  __device__ void wait_empty(int part) const {
    mbarrier_wait(shared_ + barrier_empty(buffer_, part), empty_parity_ ^ 1);
  }

  __device__ void load_boxes(int tile, int page) const {
    if (lane_ == 0) {
      const int token = modes_.tiles_per_page == 1 ? 0 : tile % modes_.tiles_per_page * kPlanTileTokens;
      if (has_rope()) {
        wait_empty(kPartRope);
        load_unit(kRope, kRopeTile, 1, token, page);
      }
      wait_empty(part_);
      const int column = first_tile_of_part(part_);
      load_unit(2 * part_ - 1, column, 2, token, page);
      load_unit(2 * part_, column + 2, 2, token, page);
    }
    __syncwarp();
  }

  __device__ void load_unit(int unit, int column, int tiles, int token, int page) const {
    const uint32_t barrier = shared_ + barrier_full(buffer_, unit);
    expect(barrier, tiles);
    for (int k = column; k < column + tiles; ++k) {
      attnops::sm90::copy_box(kv_tile(k), &maps_.kv, barrier, k * 64, token, page, read_once_);
    }
  }

  // The same from pages of less than a tile, whose numbers lanes hold, the first of them `lane`.
  __device__ void load_small_boxes(int pages, int lane) const {
    if (has_rope()) {
      wait_empty(kPartRope);
      load_small_unit(kRope, kRopeTile, 1, pages, lane);
    }
    wait_empty(part_);
    const int column = first_tile_of_part(part_);
    load_small_unit(2 * part_ - 1, column, 2, pages, lane);
    load_small_unit(2 * part_, column + 2, 2, pages, lane);
  }

  __device__ void load_small_unit(int unit, int column, int tiles, int pages, int lane) const {
    const uint32_t barrier = shared_ + barrier_full(buffer_, unit);
    if (lane_ == 0) expect(barrier, tiles);
#pragma unroll 1
    for (int i = 0; i < 1 << box_shift(); ++i) {
      const int page = __shfl_sync(0xffffffffu, pages, lane + i);
      if (lane_ == 0) {
        for (int k = column; k < column + tiles; ++k) {
          const uint32_t place = kv_tile(k) + i * (kTileBytes >> box_shift());
          attnops::sm90::copy_box(place, &maps_.kv, barrier, k * 64, 0, page, read_once_);
        }
      }
      __syncwarp();
    }
  }

  __device__ static void expect(uint32_t barrier, int tiles) {
    attnops::sm90::mbarrier_arrive(barrier, kFullArrivals - 1);
    attnops::sm90::mbarrier_arrive_expect(barrier, tiles * kTileBytes);
  }

  __device__ uint32_t kv_tile(int column) const {
    return shared_ + kKv + buffer_ * kOperandBytes + column * kTileBytes;
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

  // Where the rows of the warp's half of a tile lie, in units from the pool: those that eight lanes each copy, one
  // behind the other. Written down by the time that the tile's place falls free.
  __device__ uint32_t* row_list() const { return reinterpret_cast<uint32_t*>(base_ + kRowLists) + warp_ * kHalfRows; }

  __device__ void list_row(const Piece& piece, int t, int page) const {
    if (!p_.page_table.has_page(page)) page = 0;  // no row of a page that does not exist; of another one, nobody minds
    write_row_list(page * modes_.units.per_page + token_of(half_key(piece, t)) * modes_.units.per_token);
  }

  __device__ void write_row_list(uint32_t place) const {
    __syncwarp();
    row_list()[lane_ % 4 * kRowSteps + lane_ / 4] = place;
    __syncwarp();
  }

  // The warp's half of a tile, in flight, each unit a group of copies; the part first that is given back first.
  __device__ void copy_half() const {
    wait_empty(kPartRope);
    copy_columns<1>(kRopeTile);
#pragma unroll 1
    for (int i = 0; i < kParts - 1; ++i) {
      const int part = i == 0 ? first_part() : second_part();
      wait_empty(part);
      copy_columns<2>(first_tile_of_part(part));
      copy_columns<2>(first_tile_of_part(part) + 2);
    }
  }

  __device__ void hand_over_half() const {
    hand_over<4>(kRope, 1);
    hand_over<3>(2 * first_part() - 1, 1);
    hand_over<2>(2 * first_part(), 1);
    hand_over<1>(2 * second_part() - 1, 1);
    hand_over<0>(2 * second_part(), 1);
  }

  __device__ int first_part() const { return buffer_ == 0 ? kPartLeft : kPartRight; }
  __device__ int second_part() const { return buffer_ == 0 ? kPartRight : kPartLeft; }

  __device__ static uint64_t wide_product(uint32_t a, uint32_t b) {
    uint64_t product;
    asm("mul.wide.u32 %0, %1, %2;" : "=l"(product) : "r"(a), "r"(b));
    return product;
  }

  // Of kTiles tiles of 64 columns; eight lanes copy the 128 bytes of a row of one of them.
  template <int kTiles>
  __device__ void copy_columns(int column) const {
    const uint8_t* pool = static_cast<const uint8_t*>(p_.kv_pages) + column * 128 + lane_ % 8 * 16;
    asm volatile("" : "+l"(pool));  // in a pair of registers, where a row's place is added in one instruction
    // The swizzle repeats after eight rows, which are two steps.
    const uint32_t even = kv_tile(column) + attnops::sm90::swizzled(warp_ % 2 * kHalfRows + lane_ / 8, lane_ % 8);
    const uint32_t odd = (even ^ 64) + 512;
    const auto* list = reinterpret_cast<const uint4*>(row_list() + lane_ / 8 * kRowSteps);
    const uint8_t* source[kRowSteps];
#pragma unroll
    for (int i = 0; i < kRowSteps; i += 4) {
      const uint4 rows = list[i / 4];
      source[i] = pool + wide_product(rows.x, modes_.units.bytes);
      source[i + 1] = pool + wide_product(rows.y, modes_.units.bytes);
      source[i + 2] = pool + wide_product(rows.z, modes_.units.bytes);
      source[i + 3] = pool + wide_product(rows.w, modes_.units.bytes);
    }
    // A register that a copy reads is free for the next address some 20 cycles later: all addresses before all copies.
#pragma unroll
    for (int k = 0; k < kTiles; ++k) {
#pragma unroll
      for (int i = 0; i < kRowSteps; ++i) {
        attnops::sm90::copy16((i % 2 ? odd : even) + i / 2 * 1024 + k * kTileBytes, source[i] + k * 128, read_once_);
      }
    }
    commit_copies();
  }

  // A tile with keys that may not be read: zeros.
  __device__ void gather_some(const Piece& piece, int t, int (&page)[kRowsPerLane]) const {
    const int tile = piece.first_tile + t;
    if (kOptions == Options::kAll && p_.report) check_pages(piece, tile, page);
    int64_t offset[kRowsPerLane];
#pragma unroll
    for (int i = 0; i < kRowsPerLane; ++i) offset[i] = row_offset(tile * kPlanTileTokens + lane_ + 32 * i, page[i]);
    gather_rows(offset, [] {});
  }

  // `tell` runs when the place is free, before it is handed over.
  template <class Tell>
  __device__ void gather_rows(const int64_t (&offset)[kRowsPerLane], const Tell& tell) const {
    if (has_rope()) {
      wait_empty(kPartRope);
      copy_rows(offset, kRopeTile, 1);
    }
    wait_empty(part_);
    tell();
    copy_rows(offset, first_tile_of_part(part_), 4);
    commit_copies();
    if (has_rope()) hand_over<0>(kRope, kFullArrivals);
    hand_over<0>(2 * part_ - 1, kFullArrivals);
    hand_over<0>(2 * part_, kFullArrivals);
  }

  __device__ void copy_rows(const int64_t (&offset)[kRowsPerLane], int column, int tiles) const {
    const uint8_t* pool = static_cast<const uint8_t*>(p_.kv_pages) + lane_ % 8 * 16;
#pragma unroll
    for (int half = 0; half < kRowsPerLane; ++half) {
#pragma unroll 1
      for (int i = 0; i < 8; ++i) {
        const int row = 4 * i + lane_ / 8;
        const int64_t begin = __shfl_sync(0xffffffffu, offset[half], row);
        const uint8_t* source = pool + max_of(begin, int64_t{0}) + column * 128;
        const uint32_t place = kv_tile(column) + attnops::sm90::swizzled(32 * half + row, lane_ % 8);
#pragma unroll
        for (int k = 0; k < 4; ++k) {
          if (k < tiles) attnops::sm90::copy16(place + k * kTileBytes, source + k * 128, begin >= 0);
        }
      }
    }
  }

  __device__ static void commit_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }

  // Tells the consumers that the warp's copies of a unit are there, once all but the last kPending groups have landed.
  template <int kPending>
  __device__ void hand_over(int unit, int arrivals) const {
    asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
    attnops::sm90::fence_async_proxy();  // rows arrive by ordinary writes
    __syncwarp();
    if (lane_ == 0) attnops::sm90::mbarrier_arrive(shared_ + barrier_full(buffer_, unit), arrivals);
  }

  __device__ void load_queries(const Piece& piece, int count) const {
    if (kOptions == Options::kCommon || modes_.queries_by_map) {
      // By a warp whose own first place, of an odd tile, is not free earlier than that of the queries.
      if (warp_ == 3 && lane_ == 0 && !(count == 0 && asked_ & kAskedQueries)) {
        mbarrier_wait(shared_ + kQueriesEmpty, (count & 1) ^ 1);
        copy_queries(p_, maps_, shared_, piece.request, piece.first_row);
      }
      __syncwarp();
      return;
    }
    mbarrier_wait(shared_ + kQueriesEmpty, (count & 1) ^ 1);
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
      attnops::sm90::copy16(place + kRopeTile * kTileBytes, rope + chunk * 16, valid);
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
    if constexpr (kOptions == Options::kSelected) return check_list_length(p_, piece);
    const int64_t capacity = p_.page_table.num_cells(piece.request) * p_.page_table.page_size;
    if (piece.length <= capacity) return;
    report(ReportKind::kLength, piece.request, 0, p_.cache_seqlens[piece.request], capacity + 1);
  }

  __device__ void report(ReportKind kind, int request, int position, int64_t value, int64_t limit) const {
    record_fault(p_.report, {ReportOp::kMlaDecode, kind, request, position, value, limit});
  }

  const Params& p_;
  const Maps& maps_;
  const Modes& modes_;
  const SplitKvEntry& entry_;
  uint8_t* const base_;
  const uint32_t shared_;
  const uint64_t read_once_ = attnops::sm90::l2_policy(true);
  const int warp_, lane_;
  const int buffer_;           // 0: even tiles of a piece, 1: odd ones
  const int part_;             // of the columns
  uint32_t empty_parity_ = 0;  // of the next phase
  int asked_ = 0;              // Asked, of what is not yet passed over
};

}  // namespace attnops::mla_decode::sm90
