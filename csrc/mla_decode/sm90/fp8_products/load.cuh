#pragma once
#include "core/report.h"
#include "device/sm90/barrier.cuh"
#include "device/sm90/copy.cuh"
#include "device/sm90/wgmma.cuh"
#include "mla_decode/sm90/fp8_products/layout.h"
#include "mla_decode/sm90/pieces.cuh"

// The loading warpgroup: a ring of KV tiles. A tile whose 64 keys are one run of a page comes as boxes of the copy
// engine, any other row by row, with zeros for keys that nobody may read.
namespace attnops::mla_decode::sm90::fp8_products {

using attnops::sm90::mbarrier_wait;

template <class L>
class Loader {
 public:
  __device__ Loader(const Params& p, const CUtensorMap* map, bool use_boxes, uint32_t shared)
      : p_(p), map_(map), use_boxes_(use_boxes), shared_(shared) {}

  __device__ void run() {
    PieceWalk walk(p_);
    Piece piece;
    while (walk.next(p_, piece)) {
      check_length(piece);
      const int32_t* cells = p_.page_table.row(piece.request);
      int page = page_of(piece, cells, 0);
      for (int t = 0; t < piece.num_tiles; ++t) {
        const int next = page_of(piece, cells, t + 1);  // indices are read a tile ahead
        mbarrier_wait(shared_ + L::barrier_empty(stage_), parity_ ^ 1);
        if (is_boxed(piece, piece.first_tile + t, use_boxes_)) {
          if (threadIdx.x % kGroupThreads == 0) load_boxes(piece.first_tile + t, page);
        } else {
          gather(piece, piece.first_tile + t, page);
        }
        page = next;
        if (++stage_ == L::kStages) {
          stage_ = 0;
          parity_ ^= 1;
        }
      }
    }
    asm volatile("cp.async.wait_all;" ::: "memory");
  }

 private:
  // Two threads copy a row.
  __device__ static int row() { return threadIdx.x % kGroupThreads / 2; }

  __device__ static bool readable(const Piece& piece, int key) {
    return key >= piece.keys.begin && key < piece.keys.end;
  }

  // The page of this thread's row of tile t; -1 where there is nothing to read.
  __device__ int page_of(const Piece& piece, const int32_t* cells, int t) const {
    const int key = (piece.first_tile + t) * kPlanTileTokens + row();
    if (t >= piece.num_tiles || !readable(piece, key)) return -1;
    const int cell = key / p_.page_table.page_size;
    const int page = cells[cell];
    if (p_.report && (page < 0 || page >= p_.page_table.num_pages)) {
      if (threadIdx.x % 2 == 0) report(ReportKind::kPageIndex, piece.request, cell, page, p_.page_table.num_pages);
      return -1;
    }
    return page;
  }

  __device__ void load_boxes(int tile, int page) const {
    const int token = tile * kPlanTileTokens % p_.page_table.page_size;
    const uint32_t barrier = shared_ + L::barrier_box(stage_);
    attnops::sm90::mbarrier_arrive_expect(barrier, kStageBytes);
    for (int k = 0; k < kKeyTiles; ++k) {
      attnops::sm90::copy_box(place() + k * kTileBytes, map_, barrier, k * 128, token, page, read_once_);
    }
  }

  __device__ void gather(const Piece& piece, int tile, int page) const {
    const int token = (tile * kPlanTileTokens + row()) % p_.page_table.page_size;
    const bool valid = page >= 0;
    const auto* source = static_cast<const uint8_t*>(p_.kv_pages);
    if (valid) source += page * p_.kv_stride_page + token * p_.kv_stride_token;
#pragma unroll 2
    for (int c = threadIdx.x % 2; c < kHeadDimQk / 16; c += 2) {
      const uint32_t target = place() + c / 8 * kTileBytes + attnops::sm90::swizzled(row(), c % 8);
      attnops::sm90::copy16(target, source + c * 16, valid);
    }
    attnops::sm90::arrive_after_copies(shared_ + L::barrier_gather(stage_));
  }

  __device__ uint32_t place() const { return shared_ + L::kKv + stage_ * kStageBytes; }

  __device__ void check_length(const Piece& piece) const {
    if (p_.report == nullptr || threadIdx.x % kGroupThreads != 0) return;
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
  const uint64_t read_once_ = attnops::sm90::l2_policy(true);
  int stage_ = 0;
  uint32_t parity_ = 0;
};

}  // namespace attnops::mla_decode::sm90::fp8_products
