#pragma once
#include "device/sm90/barrier.cuh"
#include "device/sm90/copy.cuh"
#include "mla_decode/sm90/layout.h"
#include "mla_decode/sm90/modes.h"
#include "mla_decode/sm90/pieces.cuh"

// What a part asks for before its loaders begin to walk: its first queries and tiles.
namespace attnops::mla_decode::sm90 {

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

// The same of lists, in two halves: the rope part's place is given back last.
__device__ inline void copy_latent_queries(const Maps& maps, uint32_t shared, int request, int first_row) {
  attnops::sm90::mbarrier_arrive_expect(shared + kQueriesFull, kOperandBytes);
  attnops::sm90::copy_box(shared + kQ, &maps.q, shared + kQueriesFull, 0, first_row, 0, request);
}
__device__ inline void copy_rope_queries(const Params& p, const Maps& maps, uint32_t shared, int request,
                                         int first_row) {
  attnops::sm90::copy_box(shared + kQ + kRopeTile * kTileBytes, &maps.q_pe, shared + kQueriesFull,
                          p.q_pe ? 0 : kHeadDimV, first_row, request);
}

// What a part has asked for before its loaders begin, as bits.
enum Asked : int { kAskedQueries = 1, kAskedEven = 2, kAskedOdd = 4 };

// What boxes bring of a tile with so many keys: half of it where that holds all of them.
__device__ inline bool fits_half(int keys) { return keys <= kPlanTileTokens / 2; }

// Asks for a tile or its first half, by one lane; its place is free.
__device__ inline void ask_tile(const Maps& maps, uint32_t shared, int buffer, int token, int page, bool half) {
  const uint64_t read_once = attnops::sm90::l2_policy(true);
  const CUtensorMap* map = half ? &maps.kv_half : &maps.kv;
  const int bytes = half ? kTileBytes / 2 : kTileBytes;
#pragma unroll 1
  for (int k = 0; k < kTilesQk; ++k) {
    const int column = k == 0 ? kRopeTile : k - 1, unit = (k + 1) / 2;
    const uint32_t barrier = shared + barrier_full(buffer, unit);
    if (k == 0 || k % 2 == 1) {
      attnops::sm90::mbarrier_arrive(barrier, kFullArrivals - 1);
      attnops::sm90::mbarrier_arrive_expect(barrier, tiles_of_unit(unit) * bytes);
    }
    attnops::sm90::copy_box(shared + kKv + buffer * kOperandBytes + column * kTileBytes, map, barrier, column * 64,
                            token, page, read_once);
  }
}

// The first queries of a part and its first two tiles, if they hold keys, by one warp: in as few instructions and
// dependent reads as it takes, the plan's row, then length and pages, then boxes. Returns what it has asked for. Not
// for batch-invariant plans, where the first piece is not known yet (Loader::speculate).
__device__ inline int ask_first(const Params& p, const Maps& maps, const Modes& modes, const SplitKvEntry& entry,
                                uint32_t shared) {
  const int lane = threadIdx.x % 32, buffer = lane % 2;
  const int begin_work = entry.begin_work, end_work = entry.end_work, end_tile = entry.end_tile;
  if (begin_work == end_work && entry.begin_tile == end_tile) return 0;
  if (p.fixed_split_tokens > 0 || p.page_table.kv_indptr) return 0;
  const BlockPlace place = block_place(p, begin_work);
  const int tile = entry.begin_tile + buffer;
  const int cell = modes.tiles_per_page == 1 ? tile : tile / modes.tiles_per_page;
  const int token = modes.tiles_per_page == 1 ? 0 : (tile - cell * modes.tiles_per_page) * kPlanTileTokens;
  const int page = cell < p.page_table.max_pages ? p.page_table.row(place.request)[cell] : 0;
  const int length = p.cache_seqlens[place.request];
  if (lane == 2) copy_queries(p, maps, shared, place.request, place.block * kPlanRows);
  __syncwarp();
  const bool in_piece = end_work != begin_work || tile < end_tile;
  const int keys_end = min_of(length_of(length), p.page_table.num_tokens(place.request));
  const int keys = keys_end - tile * kPlanTileTokens;
  const bool has_keys = in_piece && keys > 0;
  const int tiles = __ballot_sync(0xffffffffu, has_keys) & 3;
#pragma unroll 1
  for (int i = 0; i < 2; ++i) {
    if (lane == i && has_keys) ask_tile(maps, shared, buffer, token, page, fits_half(keys));
    __syncwarp();
  }
  return kAskedQueries | tiles * kAskedEven;
}

}  // namespace attnops::mla_decode::sm90
