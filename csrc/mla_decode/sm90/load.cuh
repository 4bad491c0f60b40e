#pragma once
#include "core/report.h"
#include "device/sm90/barrier.cuh"
#include "device/sm90/copy.cuh"
#include "device/sm90/wgmma.cuh"
#include "mla_decode/sm90/layout.h"
#include "mla_decode/sm90/pieces.cuh"

// What the loading warpgroup does: queries and KV tiles of every piece into shared memory, each part as soon as the
// consumers have given its place back. A tile whose 64 keys are one run of a page comes as boxes of the copy engine,
// any other row by row, so that keys nobody may read become zeros and 0 x NaN never happens.
namespace attnops::mla_decode::sm90 {

using attnops::sm90::mbarrier_wait;

// What the host has found out about the arguments.
struct Modes {
  bool use_boxes;       // whole tiles come by the copy engine
  bool queries_by_map;  // and so do queries
  bool out_aligned;     // rows of the output start on 16-byte boundaries
  int tiles_per_page;   // of boxes
};

struct Maps {
  CUtensorMap kv, q, q_pe;
};

// The 64 rows of a block, by one thread. Rows beyond the last become zeros.
__device__ inline void copy_queries(const Params& p, const Maps& maps, uint32_t shared, int request, int first_row) {
  const uint32_t full = shared + kQueriesFull;
  attnops::sm90::mbarrier_arrive_expect(full, kOperandBytes);
  attnops::sm90::copy_box(shared + kQ + kRopeTile * kTileBytes, p.q_pe ? &maps.q_pe : &maps.q, full,
                          p.q_pe ? 0 : kHeadDimV, first_row, request);
#pragma unroll 1
  for (int k = 0; k < kTilesV; ++k) {
    attnops::sm90::copy_box(shared + kQ + k * kTileBytes, &maps.q, full, k * 64, first_row, request);
  }
}

// One of the four loading warps. Each serves one half of the columns of one of the two KV buffers, by itself: a warp
// that served more would sit in one wait while another place falls free.
template <Options kOptions>
class Loader {
 public:
  __device__ Loader(const Params& p, const Maps& maps, const Modes& modes, const SplitKvEntry& entry, uint32_t shared)
      : p_(p),
        maps_(maps),
        modes_(modes),
        entry_(entry),
        shared_(shared),
        warp_(threadIdx.x % kGroupThreads / 32),
        lane_(threadIdx.x % 32),
        buffer_(warp_ / 2),
        part_(warp_ == 0 || warp_ == 3 ? kPartLeft : kPartRight) {}

  __device__ void run() {
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
  static constexpr int kRowsPerLane = 2;  // of a gathered tile: lane and lane + 32
  static constexpr int kUnknown = INT32_MIN;
  static constexpr int kStepsAhead = 32;  // whose pages are read at once, one a lane

  // Every second tile of the piece: runs of boxes and runs of gathered tiles, in loops of their own.
  __device__ void load_tiles(const Piece& piece, int count, int first_pages) {
    const int32_t* cells = p_.page_table.row(piece.request);
    int boxes = first_pages == kUnknown ? box_pages(piece, cells, 0) : first_pages;
    int next_boxes = box_pages(piece, cells, kStepsAhead);
    // Rows of gathered tiles are looked up a tile ahead. Behind boxes comes one such tile at most, the last.
    int pages[kRowsPerLane];
    int pages_of = boxed(piece, buffer_) ? buffer_ + (piece.num_tiles - 1 - buffer_) / 2 * 2 : buffer_;
    row_pages(piece, cells, pages_of, pages);
    // At the very start odd tiles stand back for the even one: all queue at one copy engine, and scores begin with it.
    if (count == 0 && buffer_ == 1) attnops::sm90::named_barrier_sync(kFirstTile, kGroupThreads);
    int t = buffer_;
    while (t < piece.num_tiles) {
      for (; t < piece.num_tiles && boxed(piece, t); t += 2) {
        const int step = t / 2;
        if (step % kStepsAhead == 0 && step > 0) {
          boxes = next_boxes;
          next_boxes = box_pages(piece, cells, step + kStepsAhead);
        }
        load_boxes(piece.first_tile + t, __shfl_sync(0xffffffffu, boxes, step % kStepsAhead));
        empty_parity_ ^= 1;
        if (t == 0) let_odd_tiles_begin(count);
      }
      for (; t < piece.num_tiles && !boxed(piece, t); t += 2) {
        if (pages_of != t) row_pages(piece, cells, t, pages);
        int next_pages[kRowsPerLane];
        row_pages(piece, cells, t + 2, next_pages);
        gather(piece, piece.first_tile + t, pages);
        empty_parity_ ^= 1;
        if (t == 0) let_odd_tiles_begin(count);
        pages_of = t + 2;
#pragma unroll
        for (int i = 0; i < kRowsPerLane; ++i) pages[i] = next_pages[i];
      }
    }
  }

  __device__ void let_odd_tiles_begin(int count) const {
    if (count == 0) attnops::sm90::named_barrier_arrive(kFirstTile, kGroupThreads);
  }

  __device__ bool boxed(const Piece& piece, int t) const {
    return is_boxed(piece, piece.first_tile + t, modes_.use_boxes);
  }

  __device__ bool has_rope() const { return warp_ % 2 == 0; }  // with the half that is given back first

  __device__ static bool readable(const Piece& piece, int key) {
    return key >= piece.keys.begin && key < piece.keys.end;
  }

  // Pages of this lane's rows of a gathered tile; -1 where there is nothing to read.
  __device__ void row_pages(const Piece& piece, const int32_t* cells, int t, int (&page)[kRowsPerLane]) const {
    const int tile = piece.first_tile + t;
    const bool needed = t < piece.num_tiles && !boxed(piece, t);
#pragma unroll
    for (int i = 0; i < kRowsPerLane; ++i) {
      const int key = tile * kPlanTileTokens + lane_ + 32 * i;
      page[i] = -1;
      if (needed && readable(piece, key)) page[i] = cells[key / p_.page_table.page_size];
    }
  }

  // The page of this buffer's tile `step` + lane.
  __device__ int box_pages(const Piece& piece, const int32_t* cells, int step) const {
    const int t = buffer_ + 2 * (step + lane_), tile = piece.first_tile + t;
    const bool needed = t < piece.num_tiles && boxed(piece, t);
    return needed ? cells[cell_of(tile)] : 0;
  }

  __device__ int cell_of(int tile) const { return modes_.tiles_per_page == 1 ? tile : tile / modes_.tiles_per_page; }

  // The pages of the part's first boxes, asked for together with the request's length instead of after it. They are
  // used only where the length allows.
  __device__ int speculate() const {
    if (!modes_.use_boxes || window_of<kOptions>(p_) >= 0 || p_.page_table.kv_indptr) return kUnknown;
    const int request = block_place(p_, entry_.begin_work).request;
    if (request >= p_.batch_size) return kUnknown;
    const int cell = cell_of(entry_.begin_tile + buffer_ + 2 * lane_);
    return cell < p_.page_table.max_pages ? p_.page_table.row(request)[cell] : 0;
  }

  // Where a row begins, in bytes from the pool, or -1.
  __device__ int64_t row_offset(int key, int page) const {
    if (page < 0) return -1;
    return kElement *
           (page * p_.kv_stride_page + static_cast<int64_t>(key % p_.page_table.page_size) * p_.kv_stride_token);
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
    const uint32_t barrier = shared_ + barrier_box(buffer_, unit);
    attnops::sm90::mbarrier_arrive_expect(barrier, tiles * kTileBytes);
    for (int k = column; k < column + tiles; ++k) {
      attnops::sm90::copy_box(kv_tile(k), &maps_.kv, barrier, k * 64, token, page);
    }
  }

  __device__ uint32_t kv_tile(int column) const {
    return shared_ + kKv + buffer_ * kOperandBytes + column * kTileBytes;
  }

  __device__ void gather(const Piece& piece, int tile, int (&page)[kRowsPerLane]) const {
    if (kOptions == Options::kAll && p_.report) check_pages(piece, tile, page);
    int64_t offset[kRowsPerLane];
#pragma unroll
    for (int i = 0; i < kRowsPerLane; ++i) offset[i] = row_offset(tile * kPlanTileTokens + lane_ + 32 * i, page[i]);
    if (has_rope()) {
      wait_empty(kPartRope);
      copy_rows(offset, kRopeTile, 1);
      attnops::sm90::arrive_after_copies(shared_ + barrier_gather(buffer_, kPartRope));
    }
    wait_empty(part_);
    copy_rows(offset, first_tile_of_part(part_), 4);
    attnops::sm90::arrive_after_copies(shared_ + barrier_gather(buffer_, part_));
  }

  // Eight lanes copy the 128 bytes of a row of a 64 x 64 tile.
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

  __device__ void load_queries(const Piece& piece, int count) const {
    if (kOptions == Options::kCommon || modes_.queries_by_map) {
      // By a warp whose own first place, of an odd tile, is not free earlier than that of the queries.
      if (warp_ == 3 && lane_ == 0) {
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
      if (!readable(piece, key) || (page[i] >= 0 && page[i] < p_.page_table.num_pages)) continue;
      const int cell = key / p_.page_table.page_size;
      if (has_rope()) report(ReportKind::kPageIndex, piece.request, cell, page[i], p_.page_table.num_pages);
      page[i] = -1;
    }
  }

  __device__ void check_length(const Piece& piece) const {
    if (kOptions == Options::kCommon || p_.report == nullptr || warp_ + lane_ != 0) return;
    const int64_t capacity = p_.page_table.num_cells(piece.request) * p_.page_table.page_size;
    if (piece.length > capacity) report(ReportKind::kLength, piece.request, 0, piece.length, capacity + 1);
  }

  __device__ void report(ReportKind kind, int request, int position, int64_t value, int64_t limit) const {
    record_fault(p_.report, {ReportOp::kMlaDecode, kind, request, position, value, limit});
  }

  const Params& p_;
  const Maps& maps_;
  const Modes& modes_;
  const SplitKvEntry& entry_;
  const uint32_t shared_;
  const int warp_, lane_;
  const int buffer_;           // 0: even tiles of a piece, 1: odd ones
  const int part_;             // of the columns
  uint32_t empty_parity_ = 0;  // of the next phase
};

}  // namespace attnops::mla_decode::sm90
