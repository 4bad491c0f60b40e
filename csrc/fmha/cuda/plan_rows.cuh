#pragma once
#include "fmha/cuda/plan_cuts.cuh"
#include "fmha/cuda/plan_lengths.cuh"

namespace attnops::fmha {

template <int kThreads>
__device__ void write_no_rows(const TilePlan& p, int from) {
#pragma unroll 1
  for (int n = max_of(from, 0) + static_cast<int>(threadIdx.x); n < p.max_tiles; n += kThreads) {
    reinterpret_cast<int2*>(p.tile_order)[n] = {-1, -1};
  }
}

// Row `row` + `i` of the plan: tile `tiles` - 1 - `i` of a request.
__device__ inline void write_row(const TilePlan& p, bool cuts, CutScratch& scratch, int request, const Lengths& lengths,
                                 int tiles, int row, int i) {
  const int2 tile{request, tiles - 1 - i};
  reinterpret_cast<int2*>(p.tile_order)[row + i] = tile;
  if (cuts && row + i < kMostTilesToCut) {
    scratch.rows[row + i] = tile;
    scratch.units[row + i] = units_of(cost_of(p, lengths, tile.y));
  }
}

// What warps tell their lanes of requests with many rows, in shared memory.
template <int kWarps>
struct RowScratch {
  static constexpr int kAtOnce = 8;
  int4 rows[kWarps][kAtOnce];  // request, tiles, first row, rows that are in the plan
  Lengths lengths[kWarps][kAtOnce];
};

// The rows of a warp's requests, each lane's own from `row` on, of which `room` are in the plan. Half a warp writes
// those of a request that has many; all of it, where there is one.
template <int kWarps>
__device__ void write_rows_of_warp(const TilePlan& p, bool cuts, CutScratch& scratch, RowScratch<kWarps>& shared,
                                   int request, const Lengths& lengths, int tiles, int row, int room) {
  constexpr int kMostOwn = 4, kAtOnce = RowScratch<kWarps>::kAtOnce;
  const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32;
  const unsigned many = __ballot_sync(~0u, room > kMostOwn);
  const int rank = __popc(many & ((1u << lane) - 1)), count = __popc(many);
  const int team = count > 1 ? 16 : 32, own_team = lane / team, of_team = lane % team;
#pragma unroll 1
  for (int base = 0; base < count; base += kAtOnce) {
    if (room > kMostOwn && rank >= base && rank < base + kAtOnce) {
      shared.rows[warp][rank - base] = {request, tiles, row, room};
      if (cuts) shared.lengths[warp][rank - base] = lengths;
    }
    __syncwarp();
    if (cuts) {
#pragma unroll 1
      for (int at = own_team; at < min_of(count - base, kAtOnce); at += 2) {
        const int4 of = shared.rows[warp][at];
#pragma unroll 1
        for (int i = of_team; i < of.w; i += team) {
          write_row(p, true, scratch, of.x, shared.lengths[warp][at], of.y, of.z, i);
        }
      }
    } else {
      int4 of[kAtOnce / 2];
#pragma unroll
      for (int i = 0; i < kAtOnce / 2; ++i) of[i] = shared.rows[warp][2 * i + own_team];
#pragma unroll
      for (int i = 0; i < kAtOnce / 2; ++i) {
        const int shown = base + 2 * i + own_team < count ? of[i].w : 0;
#pragma unroll 1
        for (int j = of_team; j < shown; j += team) {
          write_row(p, false, scratch, of[i].x, lengths, of[i].y, of[i].z, j);
        }
      }
    }
    __syncwarp();
  }
  const int own = room > kMostOwn ? 0 : room;
#pragma unroll 1
  for (int i = 0; i < own; ++i) write_row(p, cuts, scratch, request, lengths, tiles, row, i);
}

}  // namespace attnops::fmha
