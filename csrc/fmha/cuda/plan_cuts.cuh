#pragma once
#include "fmha/cuda/plan_lengths.cuh"
#include "scheduler/varlen_cuts.h"

namespace attnops::fmha {

// What tiles are cut by, in shared memory.
struct CutScratch {
  alignas(16) int32_t units[kMostTilesToCut];           // 0: no such tile
  int2 rows[kMostTilesToCut];                           // as in the plan
  int2 before[kCutCandidates], behind[kCutCandidates];  // of CutTally, by where a tile is: tiles, pieces

  // By 256 threads or more, before a barrier ahead of the first row.
  __device__ void clear() {
    if (threadIdx.x < kMostTilesToCut / 2) reinterpret_cast<int2*>(units)[threadIdx.x] = {0, 0};
    if (threadIdx.x < kCutCandidates) before[threadIdx.x] = behind[threadIdx.x] = {0, 0};
  }
};

__device__ inline void write_head(const TilePlan& p, int pieces, const Cut& cut) {
  *reinterpret_cast<int4*>(p.pieces) = {pieces, cut.limit, cut.rows, 0};
}

// Quotients by one divisor in a quarter of a division's instructions: exact where they are below 2^21. A float that is
// 2^23 more than the quotient has it in its lowest bits, rounded to the nearest: so it is right, or one too large.
struct Reciprocal {
  static constexpr int kBits = 0x4b000000;  // of 2^23
  int value;
  float inverse;

  __device__ explicit Reciprocal(int v) : value(v) {
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(inverse) : "f"(static_cast<float>(v)));
  }
  __device__ int divide(int n) const {
    const int guess = __float_as_int(__fmaf_rn(static_cast<float>(n), inverse, 8388608.f)) - kBits;
    return guess + ((n - guess * value) >> 31);
  }
  __device__ int pieces_of(int units) const { return divide(units + value - 1); }
};

// One SM runs all of this once, so what takes time is how many different instructions there are, and what waits for
// what. Warps do the same rather than wait for each other.
constexpr int kCutThreads = 256, kCutWarps = kCutThreads / 32;
constexpr int kFewCut = 2;  // tiles that are cut, of 32

// find_cut of scheduler/varlen_cuts.h: a lane for each candidate. Called by the first kCutThreads threads.
__device__ inline Cut find_cut(const TilePlan& p, const HostKnows& known, CutScratch& scratch, int num_tiles) {
  static_assert(kCutCandidates == 32);
  const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32;
  const Cut never{kNeverCut, 0};
  const int64_t tokens = int64_t{p.cu_seqlens_q[p.geometry.num_requests]} - p.cu_seqlens_q[0];
  const bool full = has_full_tiles(num_tiles, tokens, p.geometry.tile_q);
  CutProblem problem{.works_per_tile = p.works_per_tile,
                     .num_sms = known.num_sms,
                     .max_pieces = p.max_pieces,
                     .num_tiles = num_tiles,
                     .by_sms = known.by_sms,
                     .by_works = known.by_works,
                     .piece_cost = full ? kCostOfFullPiece : kCostOfPiece};
  const int rows = rows_before_full_turns(problem);
  int sum = 0, longest = 0, longest_behind = 0;
  unsigned shortest = kNeverCut;  // less one: whoever has no tile has the largest
#pragma unroll 1
  for (int tile = lane; tile < num_tiles; tile += 128) {
#pragma unroll
    for (int i = 0; i < 128; i += 32) {
      const int units = scratch.units[tile + i];
      sum += units;
      longest = max_of(longest, units);
      if (tile + i >= rows) longest_behind = max_of(longest_behind, units);
      shortest = min_of(shortest, static_cast<unsigned>(units) - 1);
    }
  }
  problem.longest = __reduce_max_sync(~0u, longest);
  problem.total_units = __reduce_add_sync(~0u, sum);  // 512 tiles of 2^21 units at most
  problem.longest_behind = __reduce_max_sync(~0u, longest_behind);
  const int least = static_cast<int>(__reduce_min_sync(~0u, shortest)) + 1;
  if (num_tiles == 0) return never;
  const bool checked = num_tiles > 2;  // else candidate 0 tells whether cuts are worth it
  if (checked && !worth_cutting(problem, whole_estimate(problem, least))) return never;
  const int limit = cut_limit(problem, lane, [](int n, int d) { return Reciprocal(d).divide(n); });
  const Reciprocal by_limit(limit);
  CutTally before{}, behind{};
  const bool alone = num_tiles <= 8;  // each warp looks at all tiles
#pragma unroll 1
  for (int tile = alone ? 0 : 4 * warp; tile < num_tiles; tile += alone ? 4 : 4 * kCutWarps) {
    const int4 four = *reinterpret_cast<const int4*>(&scratch.units[tile]);
    const int of_tile[4] = {four.x, four.y, four.z, four.w};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int count = by_limit.pieces_of(of_tile[i]);  // 0 where there is no tile
      (tile + i < rows ? before : behind).add(count);
    }
  }
  if (!alone) {
    atomicAdd(&scratch.before[lane].x, before.tiles);
    atomicAdd(&scratch.before[lane].y, before.pieces);
    atomicAdd(&scratch.behind[lane].x, behind.tiles);
    atomicAdd(&scratch.behind[lane].y, behind.pieces);
    asm volatile("bar.sync 1, %0;" ::"n"(kCutThreads) : "memory");
    before.tiles = scratch.before[lane].x;
    before.pieces = scratch.before[lane].y;
    behind.tiles = scratch.behind[lane].x;
    behind.pieces = scratch.behind[lane].y;
  }
  const int longest_piece = min_of(limit, problem.longest), shortest_work = min_of(limit, least);
  const CutTally all{before.tiles + behind.tiles, before.pieces + behind.pieces, longest_piece, shortest_work};
  before.longest = max_of(longest_piece, problem.longest_behind);
  before.shortest = shortest_work;
  // The first of the least: by the upper halves, then the lower ones of those. -1 is the largest.
  const auto of_all = static_cast<uint64_t>(cut_estimate(problem, all));
  auto of_some = UINT64_MAX;
  if (rows < num_tiles) of_some = static_cast<uint64_t>(cut_estimate(problem, before));
  const bool some = of_some < of_all;
  const uint64_t estimate = some ? of_some : of_all;
  const auto upper = static_cast<unsigned>(estimate >> 32), lower = static_cast<unsigned>(estimate);
  const unsigned least_upper = __reduce_min_sync(~0u, upper);
  const unsigned least_lower = __reduce_min_sync(~0u, upper == least_upper ? lower : ~0u);
  const int best = __ffs(static_cast<int>(__ballot_sync(~0u, upper == least_upper && lower == least_lower))) - 1;
  const bool worth = checked || (__ballot_sync(~0u, worth_cutting(problem, static_cast<int64_t>(estimate))) & 1) != 0;
  const int pieces = some ? before.pieces : all.pieces;
  const Cut chosen{__shfl_sync(~0u, pieces > 0 ? limit : kNeverCut, best), __shfl_sync(~0u,
                                                                                       pieces == 0 ? 0
                                                                                       : some      ? rows
                                                                                                   : num_tiles,
                                                                                       best)};
  return worth ? chosen : never;
}

// Cuts the tiles that are written. Called by the first kCutThreads threads.
__device__ inline void cut_tiles(const TilePlan& p, const HostKnows& known, CutScratch& scratch, int num_tiles) {
  const Cut cut = num_tiles > kMostTilesToCut ? Cut{kNeverCut, 0} : find_cut(p, known, scratch, num_tiles);
  if (cut.limit == kNeverCut) {
    if (threadIdx.x == 0) write_head(p, 0, cut);
    return;
  }
  const int own_thread = static_cast<int>(threadIdx.x), warp = own_thread / 32, lane = own_thread % 32;
  const Reciprocal by_limit(cut.limit);
  const auto write = [&p](const int2& tile, int row, int count, int from, int step) {
#pragma unroll 1
    for (int i = from; i < count && row + i < p.max_pieces; i += step) {
      reinterpret_cast<int4*>(p.pieces)[1 + row + i] = {tile.x, tile.y, i, count};
    }
  };
  int before = 0;
#pragma unroll 1
  for (int base = 0; base < cut.rows; base += 32) {  // every warp adds them all up
    const int pieces = base + lane < cut.rows ? by_limit.pieces_of(scratch.units[base + lane]) : 0;
    unsigned rest = __ballot_sync(~0u, pieces > 1);
    if (__popc(rest) <= kFewCut) {  // all write each one's
#pragma unroll 1
      for (; rest != 0; rest &= rest - 1) {
        const int from = __ffs(static_cast<int>(rest)) - 1, count = __shfl_sync(~0u, pieces, from);
        write(scratch.rows[base + from], before, count, own_thread, kCutThreads);
        before += count;
      }
      continue;
    }
    const int more = pieces > 1 ? pieces : 0;
    int through = more;
    const int last = min_of(cut.rows - base, 32) - 1;
#pragma unroll 1
    for (int step = 1; step <= last; step *= 2) {
      const int other = __shfl_up_sync(~0u, through, step);
      if (lane >= step) through += other;
    }
    const int first = before + through - more;
    before += __shfl_sync(~0u, through, last);
    for (rest &= 0x01010101u << warp; rest != 0; rest &= rest - 1) {  // a warp writes each eighth tile's
      const int from = __ffs(static_cast<int>(rest)) - 1;
      const int row = __shfl_sync(~0u, first, from), count = __shfl_sync(~0u, pieces, from);
      write(scratch.rows[base + from], row, count, lane, 32);
    }
  }
  if (threadIdx.x == 0) write_head(p, before, cut);
}

}  // namespace attnops::fmha
