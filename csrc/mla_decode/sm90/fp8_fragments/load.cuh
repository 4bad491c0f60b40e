#pragma once
#include <type_traits>

#include "device/sm90/barrier.cuh"
#include "device/sm90/copy.cuh"
#include "device/sm90/shared_words.cuh"
#include "mla_decode/sm90/few_rows/launch.h"
#include "mla_decode/sm90/few_rows/walk.cuh"
#include "mla_decode/sm90/fp8_fragments/layout.h"
#include "mla_decode/sm90/fp8_fragments/paging.cuh"
#include "mla_decode/sm90/quarter_pages.cuh"
#include "mla_decode/sm90/raw_queries.cuh"

// What the loading warps do, as in few_rows/load.cuh: KV tiles of every piece into the ring, groups of eight tokens as
// boxes of the copy engine where a page holds whole groups and the tile no key that may not be read, everything else
// row by row, with zeros for what may not be read.
namespace attnops::mla_decode::sm90::fp8_fragments {

// Where a request is one work, its pieces are found with less.
template <class At>
struct WalkOf {
  using Type = few_rows::RequestWalkFor<At::kOptions>;
};
template <class At>
  requires(At::kQueriesInRing && !At::kShort)
struct WalkOf<At> {
  using Type = PieceWalkFor<At::kOptions>;
};
template <class At>
  requires(At::kShort)
struct WalkOf<At> {
  using Type = few_rows::ShortWalk<At::kRows, At::kCluster>;
};
template <class At>
using Walk = typename WalkOf<At>::Type;

// The same of the kernel with roles, whose part's row of the plan is in shared memory.
template <class At>
__device__ inline Walk<At> wide_walk(const Params& p, const uint8_t* base) {
  if constexpr (At::kShort) {
    return Walk<At>(p);
  } else {
    return Walk<At>(*reinterpret_cast<const SplitKvEntry*>(base + At::kEntry));
  }
}

// More bytes to come in this phase of the barrier, and no arrival.
__device__ inline void expect_bytes(uint32_t barrier, int bytes) {
  asm volatile("mbarrier.expect_tx.relaxed.cta.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}

// True for one lane of a warp. The compiler makes no loop over lanes for a copy by that one.
__device__ inline bool elected() {
  uint32_t yes;
  asm volatile(
      "{\n"
      ".reg .pred mine;\n"
      "elect.sync _|mine, 0xffffffff;\n"
      "selp.u32 %0, 1, 0, mine;\n"
      "}\n"
      : "=r"(yes));
  return yes != 0;
}

// Slot of the ring's tile number `count`, and the parity of its round.
template <class At>
struct RingSlot {
  int slot;
  uint32_t parity;
  __device__ explicit RingSlot(int count)
      : slot(count % At::kRingTiles), parity(static_cast<uint32_t>(count / At::kRingTiles & 1)) {}
};

// One of the four loading warps; it brings 16 of a tile's 64 tokens.
template <class At>
class Loader : QuarterPages<Paging> {
 public:
  __device__ Loader(const Params& p, const CUtensorMap* map, const Modes& modes, uint8_t* base, uint32_t shared,
                    const QueryMaps* query_maps = nullptr, bool queries_by_map = false)
      : QuarterPages(p, kSelects ? Paging(1, Divisor()) : Paging(p.page_table.page_size, modes.by_page_size),
                     !kSelects && modes.use_boxes, threadIdx.x / 32 - At::kConsumerThreads / 32),
        rows_(p.selected.page_size, modes.by_page_size),
        extra_rows_(p.extra.page_size, modes.by_extra_size),
        query_maps_(query_maps),
        queries_by_map_(queries_by_map),
        map_(map),
        base_(base),
        shared_(shared) {}

  __device__ void run() {
    const SplitKvEntry entry = entry_for<At::kOptions>(p_, blockIdx.x);
    run(Walk<At>(p_), first_pages(entry, p_.division.by_works.divide(entry.begin_work)), false);
  }

  // Where the part's row of the plan is in shared memory. Its first queries need nothing else. Pages are asked for
  // ahead of them: behind boxes a word takes some 2 us.
  __device__ void run(const SplitKvEntry& entry) {
    const BlockPlace at = block_place(p_, entry.begin_work);
    const bool certain = (At::kOptions == Options::kCommon || queries_by_map_) && p_.fixed_split_tokens <= 0 &&
                         entry.begin_work <= last_work_of(entry) && at.request < p_.batch_size;
    int first_page = first_pages(entry, at.request);
    if (certain) {
      const int length = kSelects ? 0 : read_ahead(p_.cache_seqlens + at.request);
      load_queries({.request = at.request, .first_row = at.block * kPlanRows});
      if (length == kUnknown) first_page = kUnknown;  // it never is; but a word that nobody uses is not read
    }
    run(Walk<At>(entry), first_page, certain);
  }

  // Of a short call. Where queries come through the ring, they are asked for while lengths are on their way, and a CTA
  // without a piece may not end before they have come.
  __device__ void run_short() {
    const ShortBlock<At::kRows> block(p_, blockIdx.x);
    if constexpr (At::kQueriesInRing) {
      load_queries({.request = block.request, .first_row = block.first_row, .num_rows = block.num_rows(p_)});
    }
    const ShortPiece<At::kRows> at(p_, block);
    if (at.cut < at.cuts) {
      Piece piece;
      Walk<At>::describe(p_, at, piece);
      if (p_.report && warp_ + lane_ == 0) check_list_lengths(p_, piece);
      load_lists(piece, at.keys);
    } else if constexpr (At::kQueriesInRing) {
      for (int i = 0; i < kQueryStages; ++i) attnops::sm90::mbarrier_wait(At::full_barrier(shared_, i), 0);
    }
    attnops::sm90::launch_dependents();
    asm volatile("cp.async.wait_all;" ::: "memory");
  }

 private:
  static constexpr bool kSelects = At::kOptions == Options::kSelected;
  static constexpr bool kShared = At::kFormat == Format::kShared;
  static constexpr bool kTwoLists = kSelects && kShared;  // in every call, as V4 has them
  static constexpr bool kRopeApart = !kShared;            // of queries, behind the latent part

  __device__ int first_pages(const SplitKvEntry& entry, int first_request) const {
    return kSelects ? kUnknown : speculate(first_request, entry.begin_tile);
  }

  __device__ void run(Walk<At> walk, int first_page, [[maybe_unused]] bool has_queries) {
    Piece piece;
    while (walk.next(p_, piece)) {
      if constexpr (kSelects) {
        if (p_.report && warp_ + lane_ == 0) check_list_lengths(p_, piece);
      } else {
        check_length(piece);
      }
      if constexpr (At::kQueriesInRing) {
        if (!has_queries) load_queries(piece);
        has_queries = false;
      }
      load_piece(piece, first_page);
      first_page = kUnknown;
    }
    // The merge may come when what is left is to compute; it may read the plan, which was whole before this kernel
    // began.
    attnops::sm90::launch_dependents();
    asm volatile("cp.async.wait_all;" ::: "memory");
  }

  __device__ void load_queries(const Piece& piece) {
#pragma unroll 1
    for (int half = 0; half < kQueryStages; ++half, ++count_) {
      const RingSlot<At> at(count_);
      const uint32_t full = At::full_barrier(shared_, at.slot), stage = shared_ + At::kKv + at.slot * At::kTileBytes;
      attnops::sm90::mbarrier_wait(At::empty_barrier(shared_, at.slot), at.parity ^ 1);
      if (At::kOptions != Options::kCommon && !queries_by_map_) {
        gather_queries<kRopeApart>(p_, piece, half, stage);
        attnops::sm90::arrive_after_copies(full);
      } else if (At::kShort && lane_ == 0) {
        attnops::sm90::mbarrier_arrive_expect(full, At::kRows * 128);
        attnops::sm90::copy_box(stage + warp_ * kTileBytes, &query_maps_->q, full, 0, piece.first_row,
                                half * kQueryTiles + warp_, piece.request);
      } else if (lane_ == 0) {
        attnops::sm90::mbarrier_arrive_expect(full, query_bytes<kRopeApart>(warp_));
        // Where there are no keys, queries of no request, which come as zeros from nowhere.
        const int request = kSelects || piece.length > 0 ? piece.request : -1;
        copy_queries_of_warp<kRopeApart>(*query_maps_, warp_, request, piece.first_row, half, stage, full);
      } else {
        attnops::sm90::mbarrier_arrive(full);
      }
      __syncwarp();
    }
  }

  __device__ void load_piece(const Piece& piece, int first_page) {
    if constexpr (kSelects) return load_lists(piece, ListKeys(p_.selected, p_.extra, piece.request));
    constexpr Options kTrees = At::kOptions == Options::kCommon ? Options::kCommon : Options::kAll;
    each_tile<kTrees>(
        piece, first_page, [&](int, int tile, int pages, int first_lane) { load_boxes(tile, pages, first_lane); },
        [&](int tile, int page) { gather(piece, tile, page); });
  }

  __device__ void load_lists(const Piece& piece, const ListKeys& keys) {
    if (kTwoLists || p_.extra.count > 0) {
      each_listed(piece, keys, [&](bool is_extra, int row) { copy_of_two(is_extra, row); });
    } else {
      each_listed(piece, [&](int row) { copy_listed(row); });
    }
  }

  __device__ void load_boxes(int tile, int pages, int first_lane) const {
    const RingSlot<At> at(count_);
    const uint32_t full = At::full_barrier(shared_, at.slot);
    const auto bring = [&](int g, int token, int page) {
      const uint32_t target = place(at.slot) + g * At::Rows::kGroupBytes;
      if constexpr (At::kScaled) {
        // A box outside the pool reads zeros; these bytes are of another page then.
        const int there = p_.page_table.has_page(page) ? page : 0;
        const uint8_t* source = pool() + there * p_.kv_stride_page + token * At::Rows::kRowBytes;
        attnops::sm90::copy_bytes(target, source, At::Rows::kGroupBytes, full, read_once_);
      } else {
        attnops::sm90::copy_box(target, map_, full, 0, token, 0, page, read_once_);
      }
    };
    bring_groups<At::kQuarterBytes>(tile, pages, first_lane, full, at.parity, bring);
  }

  // Of this warp's part of a tile.
  __device__ uint32_t place(int slot) const {
    return shared_ + At::kKv + slot * At::kTileBytes + warp_ * At::kQuarterBytes;
  }
  __device__ const uint8_t* pool() const { return static_cast<const uint8_t*>(p_.kv_pages); }

  __device__ void gather(const Piece& piece, int tile, int page) const {
    const int key = first_token(tile) + lane_ % kTokens;
    if (At::kOptions != Options::kCommon && p_.report) check_page(piece, key, page);
    const int64_t offset =
        !p_.page_table.has_page(page)
            ? -1
            : page * p_.kv_stride_page + static_cast<int64_t>(paging_.offset(key)) * p_.kv_stride_token;
    const RingSlot<At> at(count_);
    attnops::sm90::mbarrier_wait(At::empty_barrier(shared_, at.slot), at.parity ^ 1);
    if constexpr (At::kScaled) {
      gather_rows(place(at.slot), offset);
    } else {
      gather_pieces(place(at.slot), offset);
    }
    attnops::sm90::arrive_after_copies(At::full_barrier(shared_, at.slot));
  }

  // Rows that a list names, of row lane % 16; zeros where there is none.
  __device__ void copy_listed(int row) const {
    const bool there = p_.selected.has_row(row);
    const uint32_t listed = __ballot_sync(0xffffffffu, there && lane_ < kTokens);
    const uint8_t* source = pool();
    if (there) {
      source += rows_.cell(row) * p_.kv_stride_page + static_cast<int64_t>(rows_.offset(row)) * p_.kv_stride_token;
    }
    const RingSlot<At> at(count_);
    bring_rows<At::Rows::kRowBytes>(at, source, listed);
    attnops::sm90::mbarrier_arrive(At::full_barrier(shared_, at.slot));
  }

  // The same of the first pool or the second; of rows of 584 bytes with their scales.
  __device__ void copy_of_two(bool is_extra, int row) const {
    const SelectedRows& pool = is_extra ? p_.extra : p_.selected;
    const bool there = pool.has_row(row);
    const uint32_t listed = __ballot_sync(0xffffffffu, there && lane_ < kTokens);
    const auto* page = static_cast<const uint8_t*>(pool.pages);
    int token = 0;
    if (there) {
      const Paging& paging = is_extra ? extra_rows_ : rows_;
      page += paging.cell(row) * pool.stride_page;
      token = paging.offset(row);
    }
    const RingSlot<At> at(count_);
    const uint32_t full = At::full_barrier(shared_, at.slot);
    if constexpr (!kShared) {
      bring_rows<At::Rows::kRowBytes>(at, page + token * pool.stride_token, listed);
      attnops::sm90::mbarrier_arrive(full);
      return;
    }
    bring_rows<kSharedDataBytes>(at, page + int64_t{token} * kSharedDataBytes, listed);
    if (lane_ < kTokens) {
      attnops::sm90::mbarrier_arrive(full);
    } else {  // not by lane 0: only a plain arrival comes behind what it has stored
      attnops::sm90::copy8(place(at.slot) + lane_ % kTokens * At::Rows::kRowBytes + At::Rows::kScales,
                           page + int64_t{pool.page_size} * kSharedDataBytes + token * kSharedScaleBytes, there);
      attnops::sm90::arrive_after_copies(full);
    }
    __syncwarp();
  }

  // When the slot is free: the first kBytes of 16 rows, each by one copy of the copy engine; lane % 16 says where it
  // lies. And which of them there are. No arrival: that of lane 0 must be a plain one, for a fence behind what it has
  // stored would wait for the indices that are on their way.
  template <int kBytes>
  __device__ void bring_rows(const RingSlot<At>& at, const uint8_t* source, uint32_t listed) const {
    const uint32_t full = At::full_barrier(shared_, at.slot);
    const uint32_t first = place(at.slot);
    attnops::sm90::mbarrier_wait(At::empty_barrier(shared_, at.slot), at.parity ^ 1);
    if (lane_ == 0) {
      reinterpret_cast<volatile uint16_t*>(base_ + At::kListed)[4 * at.slot + warp_] = static_cast<uint16_t>(listed);
      expect_bytes(full, __popc(listed) * kBytes);
    }
    __syncwarp();
    const bool leads = elected();
#pragma unroll
    for (int row = 0; row < kTokens; ++row) {
      const auto begin = __shfl_sync(0xffffffffu, reinterpret_cast<uintptr_t>(source), row);
      if (leads && (listed >> row & 1) != 0) {
        attnops::sm90::copy_bytes(first + row * At::Rows::kRowBytes, reinterpret_cast<const void*>(begin), kBytes,
                                  full);
      }
    }
    uint32_t missing = ~listed & ((1u << kTokens) - 1);
    if (missing == 0) return;
#pragma unroll 1
    for (; missing != 0; missing &= missing - 1) {
      const uint32_t row = first + (__ffs(missing) - 1) * At::Rows::kRowBytes;
#pragma unroll 1
      for (int i = lane_ * 16; i < kBytes; i += 32 * 16) attnops::sm90::clear_words(row + i);
    }
    attnops::sm90::fence_async_proxy();  // the copy engine writes there next
  }

  // Four lanes copy the 64 bytes of a row's piece.
  __device__ void gather_pieces(uint32_t target, int64_t offset) const {
#pragma unroll 1
    for (int g = 0; g < kGroupsPerWarp; ++g) {
      const int row = kGroupTokens * g + lane_ / 4;
      const int64_t begin = __shfl_sync(0xffffffffu, offset, row);
      const uint8_t* source = pool() + max_of(begin, int64_t{0}) + lane_ % 4 * 16;
#pragma unroll
      for (int k = 0; k < kPieces; ++k) {
        attnops::sm90::copy16(target + At::Rows::place(row, k, lane_ % 4), source + k * kPieceBytes, begin >= 0);
      }
    }
  }

  // A row is 41 x 16 bytes: 32 by all lanes, and the last nine of three rows at a time.
  __device__ void gather_rows(uint32_t target, int64_t offset) const {
    constexpr int kChunks = At::Rows::kRowBytes / 16, kRest = kChunks - 32, kTogether = 32 / kRest;
    const auto copy = [&](int row, int chunk, bool inside) {
      const int64_t begin = __shfl_sync(0xffffffffu, offset, row % kTokens);
      if (!inside) return;
      attnops::sm90::copy16(target + row * At::Rows::kRowBytes + chunk * 16,
                            pool() + max_of(begin, int64_t{0}) + chunk * 16, begin >= 0);
    };
#pragma unroll 4
    for (int row = 0; row < kTokens; ++row) copy(row, lane_, true);
#pragma unroll 2
    for (int first = 0; first < kTokens; first += kTogether) {
      const int row = first + lane_ / kRest;
      copy(row, 32 + lane_ % kRest, lane_ < kTogether * kRest && row < kTokens);
    }
  }

  const Paging rows_, extra_rows_;  // of lists: where a row is in its page
  const QueryMaps* query_maps_;
  const bool queries_by_map_;
  const CUtensorMap* map_;
  uint8_t* const base_;
  const uint32_t shared_;
  const uint64_t read_once_ = attnops::sm90::l2_policy(true);
};

}  // namespace attnops::mla_decode::sm90::fp8_fragments
