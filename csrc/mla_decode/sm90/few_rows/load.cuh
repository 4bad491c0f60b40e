#pragma once
#include <climits>

#include "core/divisor.h"
#include "device/sm90/barrier.cuh"
#include "device/sm90/cluster.cuh"
#include "device/sm90/copy.cuh"
#include "device/sm90/shared_words.cuh"
#include "device/sm90/wgmma.cuh"
#include "mla_decode/sm90/few_rows/epilogue.cuh"
#include "mla_decode/sm90/few_rows/layout.h"
#include "mla_decode/sm90/few_rows/walk.cuh"
#include "mla_decode/sm90/quarter_pages.cuh"

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
// Of lists, lane 0 arrives once more, behind the bits of the keys: its copies' arrival does not order what it stores.
template <class At>
inline constexpr int kFullArrivals = At::kSelects ? 33 : 32;

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
  bool paired;            // CTAs come in clusters of two
  Divisor by_extra_size;  // of a second pool
};

struct Paging {
  const Divisor& by_page_size;
  const int& page_size;

  __device__ int cell(int key) const { return by_page_size.divide(key); }
  __device__ int offset(int key) const { return key - cell(key) * page_size; }
};

// One of the four loading warps; it brings 16 of a tile's 64 tokens.
template <class At>
class Loader : QuarterPages<Paging> {
 public:
  __device__ Loader(const Params& p, const CUtensorMap* map, const CallModes& modes, uint8_t* base, uint32_t shared)
      : QuarterPages(p, {modes.by_page_size, At::kSelects ? p.selected.page_size : p.page_table.page_size},
                     modes.use_boxes, threadIdx.x / 32 - kConsumerThreads / 32),
        map_(map),
        base_(base),
        shared_(shared),
        by_extra_size_(modes.by_extra_size),
        // Without a plan, in prefill, tokens share rows.
        read_once_(attnops::sm90::l2_policy(!At::kSelects || p.tile_scheduler_metadata)) {}

  // Before the kernels ahead have ended: looks up what the part will probably begin with, by a plan and a page table
  // that have mostly been there for long, and asks for its first tile into L2. Nothing but time depends on it.
  __device__ void guess() {
    if (At::kSelects || !use_boxes_ || !may_speculate()) return;
    const int4 row = attnops::sm90::load_guess(part_row());  // the same for all lanes, though it may be changing
    const int4 entry{from_first(row.x), from_first(row.y), from_first(row.z), from_first(row.w)};
    // Any words may stand there: what is computed of them must not overflow.
    if (entry.x < 0 || entry.x >= p_.batch_size || entry.y < 0 || entry.y > kMostTiles) return;
    const int end = entry.z == entry.x ? max_of(entry.w, 0) : entry.z > entry.x ? INT_MAX : 0;
    const int length = from_first(attnops::sm90::load_guess(p_.cache_seqlens + entry.x));
    int boxes = min_of(length_of(length), p_.page_table.num_tokens(entry.x));
    if (p_.tree_mask) boxes = min_of(boxes, length_of(length) - p_.tree_keys);
    const int tiles = min_of(min_of(end, boxes / kPlanTileTokens) - entry.y, kRingTiles);
    // Lane l has group l % 2 of tile l / 2.
    const int token = first_token(entry.y + lane_ / kGroupsPerWarp) + lane_ % kGroupsPerWarp * kGroupTokens;
    const int cell = paging_.cell(token);
    const bool needed = lane_ < kGroupsPerWarp * tiles;
    if (__any_sync(0xffffffffu, needed && cell >= p_.page_table.max_pages)) return;
    guess_ = {entry, length, p_.page_table.row(entry.x) + cell, tiles};
    if (needed && lane_ < kGroupsPerWarp) {
      attnops::sm90::prefetch_box(map_, 0, paging_.offset(token), 0, attnops::sm90::load_guess(guess_.cell));
    }
  }

  // After them: if the guess was right the first tiles can be asked for at once, all that it was made of in one round
  // trip.
  __device__ void confirm() {
    if (At::kSelects || guess_.tiles <= 0) return;
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
    RequestWalkFor<At::kOptions> walk;
    walk.begin(p_);
    RequestPiece piece;
    if constexpr (At::kSelects) {
      if (p_.shared_rows) clear_rope();
      while (walk.next(p_, piece)) {
        if (p_.report && warp_ + lane_ == 0) check_list_lengths(p_, piece);
        if (p_.extra.count > 0) {
          const ListKeys keys(p_.selected, p_.extra, piece.request);
          each_listed(piece, keys, [&](bool is_extra, int row) {
            if (is_extra) {
              gather_listed(p_.extra, {by_extra_size_, p_.extra.page_size}, row);
            } else {
              gather_listed(p_.selected, paging_, row);
            }
          });
        } else {
          each_listed(piece, [&](int row) { gather_listed(p_.selected, paging_, row); });
        }
      }
    } else {
      int first_page = speculate(walk.entry().begin_work, walk.entry().begin_tile);
      while (walk.next(p_, piece)) {
        check_length(piece);
        load_piece(piece, first_page);
        first_page = kUnknown;
        loaded_ = 0;
      }
    }
    attnops::sm90::wait_for_copies();
  }

 private:
  static constexpr int kElement = 2;

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

  __device__ void load_piece(const Piece& piece, int first_page) {
    each_tile(
        piece, first_page,
        [&](int t, int tile, int pages, int first_lane) {
          if (t >= loaded_) load_boxes(tile, count_, pages, first_lane);
        },
        [&](int tile, int page) { gather(piece, tile, page); });
  }

  // Rows that a list names, of row lane % 16; zeros where there is none. Rows of 512 values have no rope part.
  __device__ void gather_listed(const SelectedRows& pool, const Paging& paging, int row) const {
    const bool there = pool.has_row(row);
    const uint32_t listed = __ballot_sync(0xffffffffu, there && lane_ < kTokens);
    const int64_t offset = there ? kElement * (paging.cell(row) * pool.stride_page +
                                               static_cast<int64_t>(paging.offset(row)) * pool.stride_token)
                                 : -1;
    const RingPlace place = ring_place(count_, warp_);
    const uint32_t full = full_barrier<At>(shared_, place.position);
    attnops::sm90::mbarrier_wait(empty_barrier<At>(shared_, place.position), place.parity ^ 1);
    if (lane_ == 0) {
      reinterpret_cast<volatile uint16_t*>(base_ + At::kListed)[place.position] = static_cast<uint16_t>(listed);
    }
    copy_rows(pool.pages, place, offset, !p_.shared_rows);
    attnops::sm90::arrive_after_copies(full);
    if (lane_ == 0) attnops::sm90::mbarrier_arrive(full);
    __syncwarp();
  }

  // Rows of 512 values are multiplied as if they had a rope part of zeros, which nobody overwrites.
  __device__ void clear_rope() const {
    for (int t = 0; t < kRingTiles; ++t) {
      for (int i = lane_ * 16; i < kGroupsPerWarp * kPieceStride; i += 32 * 16) {
        const uint32_t group = group_place(ring_place(t, warp_), i / kPieceStride);
        attnops::sm90::clear_words(group + kPiecesV * kPieceStride + i % kPieceStride);
      }
    }
    __syncwarp();
  }

  __device__ void load_boxes(int tile, int count, int pages, int first_lane) const {
    const RingPlace place = ring_place(count, warp_);
    const uint32_t full = full_barrier<At>(shared_, place.position);
    bring_groups<kGroupsPerWarp * kGroupStride>(
        tile, pages, first_lane, full, place.parity, [&](int g, int token, int page) {
          attnops::sm90::copy_box(group_place(place, g), map_, full, 0, token, 0, page, read_once_);
        });
  }

  __device__ uint32_t group_place(const RingPlace& place, int group) const {
    return shared_ + At::kKv + place.position * kQuarterBytes + group * kGroupStride;
  }

  // Eight lanes copy the 128 bytes of a row's piece.
  __device__ void gather(const Piece& piece, int tile, int page) const {
    const int key = first_token(tile) + lane_ % kTokens;
    if (p_.report) check_page(piece, key, page);
    const int64_t offset =
        !p_.page_table.has_page(page)
            ? -1
            : kElement * (page * p_.kv_stride_page + static_cast<int64_t>(paging_.offset(key)) * p_.kv_stride_token);
    const RingPlace place = ring_place(count_, warp_);
    attnops::sm90::mbarrier_wait(empty_barrier<At>(shared_, place.position), place.parity ^ 1);
    copy_rows(p_.kv_pages, place, offset, true);
    attnops::sm90::arrive_after_copies(full_barrier<At>(shared_, place.position));
  }

  // `offset` is where row lane % 16 begins, in bytes from the pool, or below 0: zeros.
  __device__ void copy_rows(const void* pages, const RingPlace& place, int64_t offset, bool with_rope) const {
    const uint8_t* pool = static_cast<const uint8_t*>(pages) + lane_ % 8 * 16;
#pragma unroll 1
    for (int i = 0; i < kTokens / 4; ++i) {
      const int row = 4 * i + lane_ / 8;
      const int64_t begin = __shfl_sync(0xffffffffu, offset, row);
      const uint8_t* source = pool + max_of(begin, int64_t{0});
      const uint32_t target =
          group_place(place, row / kGroupTokens) + attnops::sm90::swizzled(row % kGroupTokens, lane_ % 8);
#pragma unroll
      for (int k = 0; k < kPieces; ++k) {
        if (k < kPiecesV || with_rope) copy_once(target + k * kPieceStride, source + k * 128, begin >= 0);
      }
    }
  }

  // As copy16, of what is the first to be evicted from L2.
  __device__ void copy_once(uint32_t shared, const void* global, bool valid) const {
    asm volatile("cp.async.cg.shared.global.L2::cache_hint.L2::128B [%0], [%1], 16, %2, %3;" ::"r"(shared), "l"(global),
                 "r"(valid ? 16 : 0), "l"(read_once_)
                 : "memory");
  }

  const CUtensorMap* map_;
  uint8_t* const base_;
  const uint32_t shared_;
  const Divisor& by_extra_size_;
  const uint64_t read_once_;
  Guess guess_{{0, 0, 0, 0}, 0, nullptr, 0};
  int loaded_ = 0;  // tiles of the first piece, by a guess
};

}  // namespace attnops::mla_decode::sm90::few_rows
