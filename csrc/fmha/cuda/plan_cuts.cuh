#pragma once
#include "fmha/cuda/plan_lengths.cuh"
#include "scheduler/varlen_cuts.h"

namespace attnops::fmha {

// What tiles are cut by, in shared memory.
struct CutScratch {
  alignas(16) int32_t units[kMostTilesToCut];  // 0: no such tile
  int2 rows[kMostTilesToCut];                  // as in the plan
  int pieces[kCutCandidates], cut[kCutCandidates];

  // By 256 threads or more, before a barrier ahead of the first row.
  __device__ void clear() {
    if (threadIdx.x < kMostTilesToCut / 2) reinterpret_cast<int2*>(units)[threadIdx.x] = {0, 0};
    if (threadIdx.x < kCutCandidates) pieces[threadIdx.x] = cut[threadIdx.x] = 0;
  }
};

__device__ inline void write_head(const TilePlan& p, int pieces, const Cut& cut) {
  *reinterpret_cast<int4*>(p.pieces) = {pieces, cut.limit, cut.first, 0};
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
__device__ inline Cut find_cut(const TilePlan& p, const HostKnows& known, CutScratch& scratch, int num_tiles,
                               int tokens) {
  static_assert(kCutCandidates == 32);
  const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32;
  int sum = 0, longest = 0;
  unsigned shortest = kNeverCut;  // less one: whoever has no tile has the largest
#pragma unroll 1
  for (int tile = lane; tile < num_tiles; tile += 128) {
#pragma unroll
    for (int i = 0; i < 128; i += 32) {
      const int units = scratch.units[tile + i];
      sum += units;
      longest = max_of(longest, units);
      shortest = min_of(shortest, static_cast<unsigned>(units) - 1);
    }
  }
  const CutProblem problem{.works_per_tile = p.works_per_tile,
                           .num_sms = known.num_sms,
                           .max_pieces = p.max_pieces,
                           .num_tiles = num_tiles,
                           .longest = __reduce_max_sync(~0u, longest),
                           .by_sms = known.by_sms,
                           .by_works = known.by_works,
                           .total_units = __reduce_add_sync(~0u, sum),  // 512 tiles of 2^21 units at most
                           .full = p.cut_in_part && has_full_tiles(num_tiles, tokens, p.geometry.tile_q)};
  const int least = static_cast<int>(__reduce_min_sync(~0u, shortest)) + 1;
  if (num_tiles == 0) return {};
  const bool checked = num_tiles > 2;  // else candidate 0 tells whether cuts are worth it
  if (checked && !worth_cutting(problem, whole_estimate(problem, least))) return {};
  const int full_rows = rows_of_full_turns(problem), first = first_row_of(lane, full_rows);
  int before = 0;
#pragma unroll 1
  for (int tile = lane; tile < full_rows; tile += 32) before = max_of(before, scratch.units[tile]);
  const int longest_before = __reduce_max_sync(~0u, before);
  const int limit = cut_limit(problem, full_rows, lane, [](int n, int d) { return Reciprocal(d).divide(n); });
  const Reciprocal by_limit(limit);
  CutTally tally{.longest = min_of(limit, problem.longest),
                 .shortest = min_of(least, limit),
                 .before = first > 0 ? longest_before : 0};
  const bool alone = num_tiles <= 8;  // each warp looks at all tiles
#pragma unroll 1
  for (int tile = alone ? 0 : 4 * warp; tile < num_tiles; tile += alone ? 4 : 4 * kCutWarps) {
    const int4 four = *reinterpret_cast<const int4*>(&scratch.units[tile]);
    const int of_tile[4] = {four.x, four.y, four.z, four.w};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int count = by_limit.pieces_of(of_tile[i]);  // 0 where there is no tile
      tally.add(tile + i < first ? 1 : count);
    }
  }
  if (!alone) {
    atomicAdd(&scratch.pieces[lane], tally.pieces);
    atomicAdd(&scratch.cut[lane], tally.cut);
    asm volatile("bar.sync 1, %0;" ::"n"(kCutThreads) : "memory");
    tally.pieces = scratch.pieces[lane];
    tally.cut = scratch.cut[lane];
  }
  // The first of the least: by the upper halves, then the lower ones of those. What is not possible is the largest.
  const uint64_t estimate = cut_estimate(problem, tally, first);
  const auto upper = static_cast<unsigned>(estimate >> 32), lower = static_cast<unsigned>(estimate);
  const unsigned least_upper = __reduce_min_sync(~0u, upper);
  const unsigned least_lower = __reduce_min_sync(~0u, upper == least_upper ? lower : ~0u);
  const int best = __ffs(static_cast<int>(__ballot_sync(~0u, upper == least_upper && lower == least_lower))) - 1;
  const bool worth = checked || (__ballot_sync(~0u, worth_cutting(problem, estimate)) & 1) != 0;
  const Cut chosen{__shfl_sync(~0u, tally.cut > 0 ? limit : kNeverCut, best), __shfl_sync(~0u, first, best)};
  return worth ? chosen : Cut{};
}

// Cuts the tiles that are written. Called by the first kCutThreads threads.
__device__ inline void cut_tiles(const TilePlan& p, const HostKnows& known, CutScratch& scratch, int num_tiles,
                                 int tokens) {
  const Cut cut = num_tiles > kMostTilesToCut ? Cut{} : find_cut(p, known, scratch, num_tiles, tokens);
  if (cut.limit == kNeverCut) {
    if (threadIdx.x == 0) write_head(p, 0, Cut{});
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
  for (int base = cut.first & ~31; base < num_tiles; base += 32) {  // every warp adds them all up
    const int pieces = base + lane < cut.first ? 0 : by_limit.pieces_of(scratch.units[base + lane]);
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
    const int last = min_of(num_tiles - base, 32) - 1;
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
