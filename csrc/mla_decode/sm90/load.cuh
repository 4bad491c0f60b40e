#pragma once
#include "core/report.h"
#include "device/sm90/barrier.cuh"
#include "device/sm90/copy.cuh"
#include "device/sm90/wgmma.cuh"
#include "mla_decode/sm90/layout.h"
#include "mla_decode/sm90/pieces.cuh"

// What the loading warpgroup does: queries and KV tiles of every piece into shared memory, each unit as soon as the
// consumers have given its place back. A tile whose 64 keys are one run of a page comes as boxes of the copy engine,
// any other row by row, so that keys nobody may read become zeros and 0 x NaN never happens.
namespace attnops::mla_decode::sm90 {

using attnops::sm90::mbarrier_wait;

class Loader {
 public:
  __device__ Loader(const Params& p, const CUtensorMap* map, bool use_boxes, uint32_t shared)
      : p_(p), map_(map), use_boxes_(use_boxes), shared_(shared), thread_(threadIdx.x % kGroupThreads) {}

  __device__ void run() {
    PieceWalk walk(p_);
    Piece piece;
    while (walk.next(p_, piece)) {
      check_length(piece);
      const int32_t* cells = p_.page_table.row(piece.request);
      // Pages are known one tile ahead.
      int page[kRows], next_page[kRows];
      pages_of(piece, cells, piece.first_tile, page);
      if (piece.num_tiles > 1) pages_of(piece, cells, piece.first_tile + 1, next_page);
      for (int t = 0; t < piece.num_tiles; ++t) {
        const int tile = piece.first_tile + t, buffer = t & 1;
        if (is_boxed(piece, tile, use_boxes_)) {
          load_boxes(tile, buffer, page[0]);
        } else {
          gather(piece, tile, buffer, page);
        }
        empty_parity_ ^= 1u << buffer;
        if (t == 0) load_queries(piece);
#pragma unroll
        for (int i = 0; i < kRows; ++i) page[i] = next_page[i];
        if (t + 2 < piece.num_tiles) pages_of(piece, cells, tile + 2, next_page);
      }
    }
    asm volatile("cp.async.wait_all;" ::: "memory");
  }

 private:
  // Eight threads copy the 128 bytes of a row of a 64 x 64 tile; a thread serves rows thread / 8 + 16 i.
  static constexpr int kRows = 4;
  static constexpr int kRowStep = 16;
  static constexpr int kElement = 2;

  __device__ int row_of(int i) const { return thread_ / 8 + kRowStep * i; }
  __device__ int chunk() const { return thread_ % 8; }
  __device__ uint32_t place(int i) const { return row_of(i) * 128 + ((chunk() ^ (row_of(i) & 7)) << 4); }

  __device__ static bool readable(const Piece& piece, int key) {
    return key >= piece.keys.begin && key < piece.keys.end;
  }

  // Pages of this thread's rows of a tile; -1 where there is nothing to read. A boxed tile has one page.
  __device__ void pages_of(const Piece& piece, const int32_t* cells, int tile, int (&page)[kRows]) const {
    const int first_key = tile * kPlanTileTokens;
    if (is_boxed(piece, tile, use_boxes_)) {
      page[0] = cells[first_key / p_.page_table.page_size];
      return;
    }
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      const int key = first_key + row_of(i);
      page[i] = -1;
      if (!readable(piece, key)) continue;
      const int cell = key / p_.page_table.page_size;
      page[i] = cells[cell];
      if (p_.report && (page[i] < 0 || page[i] >= p_.page_table.num_pages)) {
        if (chunk() == 0) report(ReportKind::kPageIndex, piece.request, cell, page[i], p_.page_table.num_pages);
        page[i] = -1;
      }
    }
  }

  __device__ const uint8_t* row_address(int key, int page) const {
    const int64_t element =
        page * p_.kv_stride_page + static_cast<int64_t>(key % p_.page_table.page_size) * p_.kv_stride_token;
    return static_cast<const uint8_t*>(p_.kv_pages) + element * kElement;
  }

  __device__ void wait_empty(int buffer, int part) const {
    mbarrier_wait(shared_ + barrier_empty(buffer, part), (empty_parity_ >> buffer & 1) ^ 1);
  }

  // Parts in the order in which the consumers give them back.
  __device__ static int part_in_order(int buffer, int i) { return i == 0 ? kPartRope : buffer == 0 ? i : kParts - i; }

  __device__ void load_boxes(int tile, int buffer, int page) const {
    const int token = tile * kPlanTileTokens % p_.page_table.page_size;
    const uint32_t base = shared_ + kKv + buffer * kOperandBytes;
#pragma unroll
    for (int i = 0; i < kParts; ++i) {
      const int part = part_in_order(buffer, i);
      wait_empty(buffer, part);
      if (thread_ == 0) {
        const int units = part == kPartRope ? 1 : 2;
        for (int u = 0; u < units; ++u) {
          const int unit = part == kPartRope ? kRope : 2 * part - 1 + u;
          const uint32_t barrier = shared_ + barrier_box(buffer, unit);
          attnops::sm90::mbarrier_arrive_expect(barrier, tiles_of_unit(unit) * kTileBytes);
          for (int k = 0; k < tiles_of_unit(unit); ++k) {
            const int column = first_tile_of_unit(unit) + k;
            attnops::sm90::copy_box(base + column * kTileBytes, map_, barrier, column * 64, token, page);
          }
        }
      }
    }
    __syncwarp();
  }

  __device__ void gather(const Piece& piece, int tile, int buffer, const int (&page)[kRows]) const {
    const uint8_t* source[kRows];
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      source[i] = page[i] < 0 ? static_cast<const uint8_t*>(p_.kv_pages)
                              : row_address(tile * kPlanTileTokens + row_of(i), page[i]) + chunk() * 16;
    }
    const uint32_t base = shared_ + kKv + buffer * kOperandBytes;
#pragma unroll 1
    for (int n = 0; n < kParts; ++n) {
      const int part = part_in_order(buffer, n);
      wait_empty(buffer, part);
      for (int k = 0; k < tiles_of_part(part); ++k) {
        const int column = first_tile_of_part(part) + k;
#pragma unroll
        for (int i = 0; i < kRows; ++i) {
          attnops::sm90::copy16(base + column * kTileBytes + place(i), source[i] + column * 128, page[i] >= 0);
        }
      }
      attnops::sm90::arrive_after_copies(shared_ + barrier_gather(buffer, part));
    }
  }

  __device__ void load_queries(const Piece& piece) {
    mbarrier_wait(shared_ + kQueriesEmpty, queries_parity_ ^ 1);
    queries_parity_ ^= 1;
#pragma unroll 1
    for (int i = 0; i < kRows; ++i) {
      const int row = row_of(i);
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
#pragma unroll
      for (int k = 0; k < kTilesV; ++k) {
        attnops::sm90::copy16(shared_ + kQ + k * kTileBytes + place(i), q + k * 128 + chunk() * 16, valid);
      }
      attnops::sm90::copy16(shared_ + kQ + kRopeTile * kTileBytes + place(i), rope + chunk() * 16, valid);
    }
    attnops::sm90::arrive_after_copies(shared_ + kQueriesFull);
  }

  __device__ void check_length(const Piece& piece) const {
    if (p_.report == nullptr || thread_ != 0) return;
    const int64_t capacity = p_.page_table.num_cells(piece.request) * p_.page_table.page_size;
    if (piece.length > capacity) report(ReportKind::kLength, piece.request, 0, piece.length, capacity + 1);
  }

  __device__ void report(ReportKind kind, int request, int position, int64_t value, int64_t limit) const {
    record_fault(p_.report, {ReportOp::kMlaDecode, kind, request, position, value, limit});
  }

  const Params& p_;
  const CUtensorMap* map_;
  const bool use_boxes_;
  const uint32_t shared_;
  const int thread_;
  uint32_t empty_parity_ = 0;  // of the next phase, a bit per buffer
  uint32_t queries_parity_ = 0;
};

}  // namespace attnops::mla_decode::sm90
