#pragma once
#include "core/report.h"
#include "device/sm90/barrier.cuh"
#include "device/sm90/copy.cuh"
#include "device/sm90/wgmma.cuh"
#include "mla_decode/sm90/fp8_products/layout.h"
#include "mla_decode/sm90/pieces.cuh"
#include "mla_decode/sm90/raw_queries.cuh"
#include "mla_decode/sm90/read_ahead.cuh"

// The loading warpgroup: a ring of stages, two with the queries of a piece and one with each of its KV tiles. A tile
// whose 64 keys are one run of a page comes as boxes of the copy engine, any other row by row, with zeros for keys that
// nobody may read.
namespace attnops::mla_decode::sm90::fp8_products {

using attnops::sm90::mbarrier_wait;

// What the host has found out about the arguments.
struct Modes {
  bool use_boxes;       // whole tiles come by the copy engine
  bool queries_by_map;  // and so do queries
  bool out_aligned;     // rows of the output start on 16-byte boundaries
  int tiles_per_page;   // of boxes
};

struct Maps {
  CUtensorMap latent, rope;
  QueryMaps queries;
};

template <Options kOptions>
class Loader {
  using L = Layout;

 public:
  __device__ Loader(const Params& p, const Maps& maps, const Modes& modes, const SplitKvEntry& entry, uint32_t shared)
      : p_(p), maps_(maps), modes_(modes), entry_(entry), shared_(shared), lane_(threadIdx.x % 32) {}

  __device__ void run() {
    PieceWalkFor<kOptions> walk(entry_);
    int first_pages = speculate();
    bool asked = ask_early(first_pages);
    Piece piece;
    while (walk.next(p_, piece)) {
      check_length(piece);
      if (!asked) load_queries(piece);
      load_tiles(piece, first_pages);
      first_pages = kUnknown;
      asked = false;
    }
    asm volatile("cp.async.wait_all;" ::: "memory");
  }

 private:
  static constexpr int kUnknown = INT32_MIN;
  static constexpr int kTilesAhead = 32;  // of boxes, whose pages are read at once, one a lane

  __device__ void load_tiles(const Piece& piece, int first_pages) {
    const int32_t* cells = p_.page_table.row(piece.request);
    int boxes = first_pages == kUnknown ? box_pages(piece, cells, 0) : first_pages;
    int next_boxes = box_pages(piece, cells, kTilesAhead);
    // Rows of gathered tiles are looked up a tile ahead. Behind boxes comes one such tile at most, the last.
    int page_of = boxed(piece, 0) ? piece.num_tiles - 1 : 0, page = row_page(piece, cells, page_of);
    for (int t = 0; t < piece.num_tiles; ++t) {
      if (t % kTilesAhead == 0 && t > 0) {
        boxes = next_boxes;
        next_boxes = box_pages(piece, cells, t + kTilesAhead);
      }
      wait_empty();
      if (boxed(piece, t)) {
        const int box = __shfl_sync(0xffffffffu, boxes, t % kTilesAhead);
        if (threadIdx.x % kGroupThreads == 0) {
          load_boxes(piece.first_tile + t, box);
        } else {
          attnops::sm90::mbarrier_arrive(shared_ + L::barrier_full(stage_));
        }
        __syncwarp();
      } else {
        if (page_of != t) page = row_page(piece, cells, t);
        const int next = row_page(piece, cells, t + 1);
        gather(piece, piece.first_tile + t, page);
        page_of = t + 1, page = next;
      }
      advance();
    }
  }

  // By every thread: a wait that skipped a round would not see the next.
  __device__ void wait_empty() const { mbarrier_wait(shared_ + L::barrier_empty(stage_), parity_ ^ 1); }

  __device__ void advance() {
    if (++stage_ < L::kStages) return;
    stage_ = 0;
    parity_ ^= 1;
  }

  // The part's first queries, which need nothing but its row of the plan, where it is certain to have some.
  __device__ bool ask_early(int& first_pages) {
    if (!by_map() || p_.fixed_split_tokens > 0 || entry_.begin_work > last_work_of(entry_)) return false;
    const BlockPlace at = block_place(p_, entry_.begin_work);
    if (at.request >= p_.batch_size) return false;
    const int length = read_ahead(p_.cache_seqlens + at.request);
    copy_queries(at.request, at.block * kPlanRows);
    if (length == kUnknown) first_pages = kUnknown;  // it never is; but a word that nobody uses is not read
    return true;
  }

  __device__ bool by_map() const { return kOptions == Options::kCommon || modes_.queries_by_map; }

  __device__ void load_queries(const Piece& piece) {
    // Where there are no keys, queries of no request, which come as zeros from nowhere.
    if (by_map()) return copy_queries(piece.length > 0 ? piece.request : -1, piece.first_row);
#pragma unroll 1
    for (int half = 0; half < kQueryStages; ++half) {
      wait_empty();
      gather_queries(p_, piece, half, place());
      attnops::sm90::arrive_after_copies(shared_ + L::barrier_full(stage_));
      advance();
    }
  }

  __device__ void copy_queries(int request, int first_row) {
#pragma unroll 1
    for (int half = 0; half < kQueryStages; ++half) {
      wait_empty();
      const uint32_t full = shared_ + L::barrier_full(stage_);
      if (lane_ == 0) {
        const int warp = threadIdx.x % kGroupThreads / 32;
        attnops::sm90::mbarrier_arrive_expect(full, query_bytes(warp));
        copy_queries_of_warp(maps_.queries, warp, request, first_row, half, place(), full);
      } else {
        attnops::sm90::mbarrier_arrive(full);
      }
      __syncwarp();
      advance();
    }
  }

  __device__ bool boxed(const Piece& piece, int t) const {
    return is_boxed<kOptions>(p_, piece, piece.first_tile + t, modes_.use_boxes);
  }

  // Two threads copy a row.
  __device__ static int row() { return threadIdx.x % kGroupThreads / 2; }

  // The page of this thread's row of a gathered tile; -1 where there is nothing to read.
  __device__ int row_page(const Piece& piece, const int32_t* cells, int t) const {
    const int key = (piece.first_tile + t) * kPlanTileTokens + row();
    if (t >= piece.num_tiles || boxed(piece, t) || !is_readable<kOptions>(p_, piece, key)) return -1;
    const int cell = key / p_.page_table.page_size;
    const int page = cells[cell];
    if (kOptions == Options::kAll && p_.report && !p_.page_table.has_page(page)) {
      if (threadIdx.x % 2 == 0) report(ReportKind::kPageIndex, piece.request, cell, page, p_.page_table.num_pages);
      return -1;
    }
    return page;
  }

  // The page of tile t + lane.
  __device__ int box_pages(const Piece& piece, const int32_t* cells, int t) const {
    t += lane_;
    return t < piece.num_tiles && boxed(piece, t) ? cells[cell_of(piece.first_tile + t)] : 0;
  }

  __device__ int cell_of(int tile) const { return modes_.tiles_per_page == 1 ? tile : tile / modes_.tiles_per_page; }

  // The pages of the part's first boxes, asked for together with the request's length instead of after it. They are
  // used only where the length allows. Batch-invariant plans may pass over a request that has more cuts than there is
  // room for, so there the first piece is not known yet.
  __device__ int speculate() const {
    if (!modes_.use_boxes || window_of<kOptions>(p_) >= 0 || p_.page_table.kv_indptr || p_.fixed_split_tokens > 0) {
      return kUnknown;
    }
    const int request = block_place(p_, entry_.begin_work).request;
    if (request >= p_.batch_size) return kUnknown;
    const int cell = cell_of(entry_.begin_tile + lane_);
    return cell < p_.page_table.max_pages ? read_ahead(p_.page_table.row(request) + cell) : 0;
  }

  __device__ void load_boxes(int tile, int page) const {
    const int token = modes_.tiles_per_page == 1 ? 0 : tile % modes_.tiles_per_page * kPlanTileTokens;
    const uint32_t barrier = shared_ + L::barrier_full(stage_);
    attnops::sm90::mbarrier_arrive_expect(barrier, kStageBytes);
    for (int k = 0; k < kLatentTiles; ++k) {
      attnops::sm90::copy_box(place() + k * kTileBytes, &maps_.latent, barrier, k * 128, token, page, read_once_);
    }
    attnops::sm90::copy_box(place() + kRope, &maps_.rope, barrier, kHeadDimV, token, page, read_once_);
  }

  __device__ void gather(const Piece& piece, int tile, int page) const {
    const int token = (tile * kPlanTileTokens + row()) % p_.page_table.page_size;
    const bool valid = p_.page_table.has_page(page);
    const auto* source = static_cast<const uint8_t*>(p_.kv_pages);
    if (valid) source += page * p_.kv_stride_page + token * p_.kv_stride_token;
    const int half = threadIdx.x % 2;
#pragma unroll 2
    for (int c = half; c < kHeadDimV / 16; c += 2) {
      const uint32_t target = place() + c / 8 * kTileBytes + attnops::sm90::swizzled(row(), c % 8);
      attnops::sm90::copy16(target, source + c * 16, valid);
    }
#pragma unroll
    for (int c = 0; c < 4; c += 2) {
      attnops::sm90::copy16(place() + kRope + swizzled_half(row(), c + half), source + kHeadDimV + (c + half) * 16,
                            valid);
    }
    attnops::sm90::arrive_after_copies(shared_ + L::barrier_full(stage_));
  }

  __device__ uint32_t place() const { return shared_ + L::kKv + stage_ * kStageBytes; }

  __device__ void check_length(const Piece& piece) const {
    if (kOptions == Options::kCommon || p_.report == nullptr || threadIdx.x % kGroupThreads != 0) return;
    check_table_length(p_, piece);
  }

  __device__ void report(ReportKind kind, int request, int position, int64_t value, int64_t limit) const {
    record_fault(p_.report, {ReportOp::kMlaDecode, kind, request, position, value, limit});
  }

  const Params& p_;
  const Maps& maps_;
  const Modes& modes_;
  const SplitKvEntry& entry_;
  const uint32_t shared_;
  const int lane_;
  const uint64_t read_once_ = attnops::sm90::l2_policy(true);
  int stage_ = 0;
  uint32_t parity_ = 0;
};

}  // namespace attnops::mla_decode::sm90::fp8_products
