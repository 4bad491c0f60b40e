#pragma once
#include <climits>

#include "core/divisor.h"
#include "core/report.h"
#include "device/sm90/barrier.cuh"
#include "device/sm90/cluster.cuh"
#include "device/sm90/copy.cuh"
#include "device/sm90/wgmma.cuh"
#include "mla_decode/sm90/few_rows/epilogue.cuh"
#include "mla_decode/sm90/few_rows/layout.h"
#include "mla_decode/sm90/few_rows/walk.cuh"

// What the loading warps do: KV tiles of every piece into the ring, each as soon as its slot is given back. Groups of
// eight tokens come as boxes of the copy engine where a page holds whole groups and the tile no key that may not be
// read; everything else row by row, so that keys nobody may read become zeros and 0 x NaN never happens.
namespace attnops::mla_decode::sm90::few_rows {

// Where a quarter of the ring's tile number `count` lies, and the parity of its round.
struct RingPlace {
  int position;
  uint32_t parity;
};
__device__ inline RingPlace ring_place(int count, int quarter) {
  return {count % kRingTiles * kLoadingWarps + quarter, static_cast<uint32_t>(count / kRingTiles & 1)};
}

// Barriers: a quarter is full when all lanes of its loading warp have arrived, and empty when all consumer warps have.
template <class At>
__device__ inline uint32_t full_barrier(uint32_t shared, int position) {
  return shared + At::kBarriers + 16 * position;
}

template <class At>
__device__ inline uint32_t empty_barrier(uint32_t shared, int position) {
  return full_barrier<At>(shared, position) + 8;
}

// What the host has found out about the arguments.
struct CallModes {
  bool use_boxes;  // whole tiles come by the copy engine
  Divisor by_page_size;
  RowModes rows;
  bool paired;  // CTAs come in clusters of two
};

// One of the four loading warps; it brings 16 of a tile's 64 tokens.
template <class At>
class Loader {
 public:
  __device__ Loader(const Params& p, const CUtensorMap* map, const CallModes& modes, uint32_t shared)
      : p_(p),
        map_(map),
        modes_(modes),
        use_boxes_(modes.use_boxes),
        shared_(shared),
        warp_(threadIdx.x / 32 - kConsumerThreads / 32),
        lane_(threadIdx.x % 32) {}

  // Before the kernels ahead have ended: looks up what the part will probably begin with, by a plan and a page table
  // that have mostly been there for long, and asks for its first tile into L2. Nothing but time depends on it.
  __device__ void guess() {
    if (!use_boxes_ || p_.window_left >= 0 || p_.page_table.kv_indptr || p_.fixed_split_tokens > 0) return;
    const int4 row = attnops::sm90::load_guess(part_row());  // the same for all lanes, though it may be changing
    const int4 entry{from_first(row.x), from_first(row.y), from_first(row.z), from_first(row.w)};
    if (entry.x < 0 || entry.x >= p_.batch_size || entry.y < 0) return;
    const int end = entry.z == entry.x ? entry.w : entry.z > entry.x ? INT_MAX : 0;
    const int length = from_first(attnops::sm90::load_guess(p_.cache_seqlens + entry.x));
    const int tiles = min_of(min_of(end, length / kPlanTileTokens) - entry.y, kRingTiles);
    // Lane l has group l % 2 of tile l / 2.
    const int token = first_token(entry.y + lane_ / kGroupsPerWarp) + lane_ % kGroupsPerWarp * kGroupTokens;
    const int cell = cell_of(token);
    const bool needed = lane_ < kGroupsPerWarp * tiles;
    if (__any_sync(0xffffffffu, needed && cell >= p_.page_table.max_pages)) return;
    guess_ = {entry, length, p_.page_table.row(entry.x) + cell, tiles};
    if (needed && lane_ < kGroupsPerWarp) {
      attnops::sm90::prefetch_box(map_, 0, offset_of(token), 0, attnops::sm90::load_guess(guess_.cell));
    }
  }

  // After them: if the guess was right the first tiles can be asked for at once, all that it was made of in one round
  // trip.
  __device__ void confirm() {
    if (guess_.tiles <= 0) return;
    const int4 entry = *part_row();
    const int length = p_.cache_seqlens[guess_.entry.x];
    const int page = lane_ < kGroupsPerWarp * guess_.tiles ? *guess_.cell : 0;
    const bool right = entry.x == guess_.entry.x && entry.y == guess_.entry.y && entry.z == guess_.entry.z &&
                       entry.w == guess_.entry.w && length == guess_.length;
    if (!__all_sync(0xffffffffu, right)) return;
    for (int t = 0; t < guess_.tiles; ++t) load_boxes(entry.y + t, t, page, t * kGroupsPerWarp);
    loaded_ = guess_.tiles;
  }

  __device__ void run() {
    RequestWalk walk;
    walk.begin(p_);
    int first_page = speculate(walk.entry());
    RequestPiece piece;
    while (walk.next(p_, piece)) {
      check_length(piece);
      load_piece(piece, first_page);
      first_page = kUnknown;
      loaded_ = 0;
    }
    attnops::sm90::wait_for_copies();
  }

 private:
  static constexpr int kElement = 2;
  static constexpr int kTokens = kQuarterTokens;           // of a tile, per warp
  static constexpr int kTilesAhead = 32 / kGroupsPerWarp;  // whose page indices are read at once

  static constexpr int kUnknown = INT32_MIN;

  struct Guess {
    int4 entry;
    int length;
    const int32_t* cell;  // of this lane's group
    int tiles;            // that can be loaded by it
  };

  __device__ static int from_first(int value) { return __shfl_sync(0xffffffffu, value, 0); }

  __device__ const int4* part_row() const {
    return reinterpret_cast<const int4*>(p_.tile_scheduler_metadata) + 2 * static_cast<int64_t>(blockIdx.x);
  }

  __device__ int cell_of(int key) const { return modes_.by_page_size.divide(key); }
  __device__ int offset_of(int key) const { return key - cell_of(key) * p_.page_table.page_size; }

  // Page indices of the part's first tiles, as row_page and group_page find them, asked for together with the length
  // of the request instead of after it. They are used only where the length allows. Batch-invariant plans may pass over
  // a request that has more cuts than there is room for, so there the first piece is not known yet.
  __device__ int speculate(const SplitKvEntry& entry) const {
    if (p_.window_left >= 0 || p_.page_table.kv_indptr || p_.fixed_split_tokens > 0) return kUnknown;
    if (entry.begin_work >= p_.batch_size) return kUnknown;
    const int tile = entry.begin_tile + (use_boxes_ ? lane_ / kGroupsPerWarp : 0);
    const int token = use_boxes_ ? lane_ % kGroupsPerWarp * kGroupTokens : lane_ % kTokens;
    const int cell = cell_of(first_token(tile) + token);
    return cell < p_.page_table.max_pages ? p_.page_table.row(entry.begin_work)[cell] : 0;
  }

  __device__ void load_piece(const Piece& piece, int first_page) {
    const int32_t* cells = p_.page_table.row(piece.request);
    // Indices are read ahead: of the next gathered tile, one row a lane, and of 16 boxed tiles, one group a lane.
    int next_row = -1, groups = 0, next_groups = 0;
    if (first_page == kUnknown || use_boxes_) {
      next_row = row_page(piece, cells, 0);
    } else if (readable(piece, first_token(piece.first_tile) + lane_ % kTokens)) {
      next_row = first_page;
    }
    if (use_boxes_) next_groups = first_page == kUnknown ? group_page(piece, cells, 0) : first_page;
    for (int t = 0; t < piece.num_tiles; ++t, ++count_) {
      const int tile = piece.first_tile + t, row = next_row;
      const bool boxed = is_boxed(piece, tile, use_boxes_);
      if (t % kTilesAhead == 0) {
        groups = next_groups;
        if (use_boxes_) next_groups = group_page(piece, cells, t + kTilesAhead);
      }
      if (boxed && t >= loaded_) load_boxes(tile, count_, groups, t % kTilesAhead * kGroupsPerWarp);
      next_row = row_page(piece, cells, t + 1);
      if (!boxed) gather(piece, tile, row);
    }
  }

  __device__ int first_token(int tile) const { return tile * kPlanTileTokens + warp_ * kTokens; }

  __device__ static bool readable(const Piece& piece, int key) {
    return key >= piece.keys.begin && key < piece.keys.end;
  }

  // The page of row lane % 16 of this warp's part of a gathered tile; -1 where there is nothing to read.
  __device__ int row_page(const Piece& piece, const int32_t* cells, int t) const {
    const int tile = piece.first_tile + t, key = first_token(tile) + lane_ % kTokens;
    const bool needed = t < piece.num_tiles && !is_boxed(piece, tile, use_boxes_) && readable(piece, key);
    return needed ? cells[cell_of(key)] : -1;
  }

  // The page of group lane % kGroupsPerWarp of tile t + lane / kGroupsPerWarp.
  __device__ int group_page(const Piece& piece, const int32_t* cells, int t) const {
    t += lane_ / kGroupsPerWarp;
    const int tile = piece.first_tile + t, key = first_token(tile) + lane_ % kGroupsPerWarp * kGroupTokens;
    const bool needed = t < piece.num_tiles && is_boxed(piece, tile, use_boxes_);
    return needed ? cells[cell_of(key)] : 0;
  }

  __device__ void load_boxes(int tile, int count, int pages, int first_lane) const {
    const RingPlace place = ring_place(count, warp_);
    const uint32_t full = full_barrier<At>(shared_, place.position);
    int page[kGroupsPerWarp];
#pragma unroll
    for (int g = 0; g < kGroupsPerWarp; ++g) page[g] = __shfl_sync(0xffffffffu, pages, first_lane + g);
    // By every lane: an arrival before the slot is empty would count for the tile that is still in it.
    attnops::sm90::mbarrier_wait(empty_barrier<At>(shared_, place.position), place.parity ^ 1);
    if (lane_ == 0) {
      attnops::sm90::mbarrier_arrive_expect(full, kGroupsPerWarp * kGroupStride);
#pragma unroll
      for (int g = 0; g < kGroupsPerWarp; ++g) {
        const int token = offset_of(first_token(tile) + g * kGroupTokens);
        attnops::sm90::copy_box(group_place(place, g), map_, full, 0, token, 0, page[g], read_once_);
      }
    } else {
      attnops::sm90::mbarrier_arrive(full);
    }
    __syncwarp();
  }

  __device__ uint32_t group_place(const RingPlace& place, int group) const {
    return shared_ + At::kKv + place.position * kQuarterBytes + group * kGroupStride;
  }

  // Eight lanes copy the 128 bytes of a row's piece.
  __device__ void gather(const Piece& piece, int tile, int page) const {
    const int key = first_token(tile) + lane_ % kTokens;
    if (p_.report) check_page(piece, key, page);
    const int64_t offset =
        page < 0 ? -1
                 : kElement * (page * p_.kv_stride_page + static_cast<int64_t>(offset_of(key)) * p_.kv_stride_token);
    const uint8_t* pool = static_cast<const uint8_t*>(p_.kv_pages) + lane_ % 8 * 16;
    const RingPlace place = ring_place(count_, warp_);
    attnops::sm90::mbarrier_wait(empty_barrier<At>(shared_, place.position), place.parity ^ 1);
#pragma unroll 1
    for (int i = 0; i < kTokens / 4; ++i) {
      const int row = 4 * i + lane_ / 8;
      const int64_t begin = __shfl_sync(0xffffffffu, offset, row);
      const uint8_t* source = pool + max_of(begin, int64_t{0});
      const uint32_t target =
          group_place(place, row / kGroupTokens) + attnops::sm90::swizzled(row % kGroupTokens, lane_ % 8);
#pragma unroll
      for (int k = 0; k < kPieces; ++k) attnops::sm90::copy16(target + k * kPieceStride, source + k * 128, begin >= 0);
    }
    attnops::sm90::arrive_after_copies(full_barrier<At>(shared_, place.position));
  }

  // Checked mode: a row of a page that does not exist is reported, once, and left out.
  __device__ void check_page(const Piece& piece, int key, int& page) const {
    if (!readable(piece, key) || (page >= 0 && page < p_.page_table.num_pages)) return;
    const int cell = cell_of(key);
    if (lane_ < kTokens) report(ReportKind::kPageIndex, piece.request, cell, page, p_.page_table.num_pages);
    page = -1;
  }

  __device__ void check_length(const Piece& piece) const {
    if (p_.report == nullptr || warp_ + lane_ != 0) return;
    const int64_t capacity = p_.page_table.num_cells(piece.request) * p_.page_table.page_size;
    if (piece.length > capacity) report(ReportKind::kLength, piece.request, 0, piece.length, capacity + 1);
  }

  __device__ void report(ReportKind kind, int request, int position, int64_t value, int64_t limit) const {
    record_fault(p_.report, {ReportOp::kMlaDecode, kind, request, position, value, limit});
  }

  const Params& p_;
  const CUtensorMap* map_;
  const CallModes& modes_;
  const bool use_boxes_;
  const uint32_t shared_;
  const uint64_t read_once_ = attnops::sm90::l2_policy(true);
  const int warp_, lane_;
  Guess guess_{{0, 0, 0, 0}, 0, nullptr, 0};
  int loaded_ = 0;  // tiles of the first piece, by a guess
  int count_ = 0;   // tiles of the ring so far
};

}  // namespace attnops::mla_decode::sm90::few_rows
