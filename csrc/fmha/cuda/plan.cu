#include <stdexcept>
#include <string>

#include "device/common/arch.h"
#include "device/common/block_scan.cuh"
#include "device/common/launch_dependent.cuh"
#include "device/common/pdl.cuh"
#include "fmha/cuda/plan.h"
#include "scheduler/varlen_cuts.h"

namespace attnops::fmha {
namespace {

constexpr int kMostRequestsToCut = 1024;  // tiles of more requests are left whole

struct Lengths {
  int queries, keys;
};

// What the host knows beside the plan. Lengths are asked for at once: no read waits for another.
struct HostKnows {
  const int32_t *first_query, *first_key, *end_key;
  bool has_lengths;  // end_key is them
  Divisor by_tile_q, by_sms;
  int num_sms;

  HostKnows(const TilePlan& p, int sms)
      : first_query(p.cu_seqlens_q),
        first_key(p.cu_seqlens_k != nullptr ? p.cu_seqlens_k : p.cu_seqlens_q),
        end_key(first_key + 1),
        has_lengths(p.cu_seqlens_k == nullptr && p.cache_seqlens != nullptr),
        by_tile_q(p.geometry.tile_q),
        by_sms(sms),
        num_sms(sms) {
    if (has_lengths) end_key = p.cache_seqlens;
  }

  __device__ Lengths lengths_of(int request) const {
    const int first = first_query[request], end = first_query[request + 1];
    const int first_of_keys = first_key[request], end_of_keys = end_key[request];
    return {end - first, has_lengths ? end_of_keys : end_of_keys - first_of_keys};
  }
};

// No more than the plan has rows for: hostile lengths must not overflow.
__device__ int num_query_tiles(const TilePlan& p, const HostKnows& known, int queries) {
  return queries > 0 ? min_of(known.by_tile_q.divide(queries - 1), p.max_tiles) + 1 : 0;
}

// Of lengths of 31 bits, so it has no more.
__device__ unsigned cost_of(const TilePlan& p, const Lengths& lengths, int tile) {
  return static_cast<unsigned>(varlen_tile_cost(p.geometry, lengths.queries, lengths.keys, tile));
}

// cost_units of such a cost.
__device__ int units_of(unsigned cost) {
  return static_cast<int>(min_of((cost + kUnitKeys - 1) / kUnitKeys, 1u << 21));
}

// Bin of a request: of its last tile.
__device__ int bin_of(const TilePlan& p, const Lengths& lengths, int num_tiles) {
  return cost_bin(cost_of(p, lengths, num_tiles - 1));
}

template <int kThreads>
__device__ void write_no_rows(const TilePlan& p, int from) {
#pragma unroll 1
  for (int n = max_of(from, 0) + static_cast<int>(threadIdx.x); n < p.max_tiles; n += kThreads) {
    reinterpret_cast<int2*>(p.tile_order)[n] = {-1, -1};
  }
}

__device__ void write_head(const TilePlan& p, int pieces, int limit) {
  *reinterpret_cast<int4*>(p.pieces) = {pieces, limit, 0, 0};
}

// What tiles are cut by, in shared memory.
struct CutScratch {
  alignas(16) int32_t units[kMostTilesToCut];  // 0: no such tile
  int2 rows[kMostTilesToCut];                  // as in the plan
  CutTally tally[kCutCandidates];

  // By 256 threads or more, before a barrier ahead of the first row.
  __device__ void clear() {
    if (threadIdx.x < kMostTilesToCut / 2) reinterpret_cast<int2*>(units)[threadIdx.x] = {0, 0};
    if (threadIdx.x < kCutCandidates) tally[threadIdx.x] = {};
  }
};

// Row `row` + `i` of the plan: tile `tiles` - 1 - `i` of a request.
__device__ void write_row(const TilePlan& p, bool cuts, CutScratch& scratch, int request, const Lengths& lengths,
                          int tiles, int row, int i) {
  const int2 tile{request, tiles - 1 - i};
  reinterpret_cast<int2*>(p.tile_order)[row + i] = tile;
  if (cuts && row + i < kMostTilesToCut) {
    scratch.rows[row + i] = tile;
    scratch.units[row + i] = units_of(cost_of(p, lengths, tile.y));
  }
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

// The limit of scheduler/varlen_cuts.h: a lane for each candidate. Called by the first kCutThreads threads.
__device__ int find_limit(const TilePlan& p, const HostKnows& known, CutScratch& scratch, int num_tiles) {
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
                           .total_units = __reduce_add_sync(~0u, sum)};  // 512 tiles of 2^21 units at most
  const int least = static_cast<int>(__reduce_min_sync(~0u, shortest)) + 1;
  if (num_tiles == 0) return kNeverCut;
  if (!worth_cutting(problem, whole_estimate(problem, least))) return kNeverCut;
  const int limit = cut_limit(problem, lane, [](int n, int d) { return Reciprocal(d).divide(n); });
  const Reciprocal by_limit(limit);
  CutTally tally;
  const bool alone = num_tiles <= 8;  // each warp looks at all tiles
#pragma unroll 1
  for (int tile = alone ? 0 : 4 * warp; tile < num_tiles; tile += alone ? 4 : 4 * kCutWarps) {
    const int4 four = *reinterpret_cast<const int4*>(&scratch.units[tile]);
    const int of_tile[4] = {four.x, four.y, four.z, four.w};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      tally.add(of_tile[i], limit, by_limit.pieces_of(of_tile[i]));  // of no tile 0
    }
  }
  if (!alone) {
    CutTally& all = scratch.tally[lane];
    atomicAdd(&all.pieces, tally.pieces);
    atomicAdd(&all.cut, tally.cut);
    atomicAdd(&all.large, tally.large);
    atomicAdd(&all.large_units, tally.large_units);
    asm volatile("bar.sync 1, %0;" ::"n"(kCutThreads) : "memory");
    tally = all;
  }
  // The first of the least: by the upper halves, then the lower ones of those. -1 is the largest.
  const int64_t estimate = cut_estimate(problem, tally, limit);
  const auto upper = static_cast<unsigned>(static_cast<uint64_t>(estimate) >> 32),
             lower = static_cast<unsigned>(estimate);
  const unsigned least_upper = __reduce_min_sync(~0u, upper);
  const unsigned least_lower = __reduce_min_sync(~0u, upper == least_upper ? lower : ~0u);
  const int best = __ffs(static_cast<int>(__ballot_sync(~0u, upper == least_upper && lower == least_lower))) - 1;
  return __shfl_sync(~0u, tally.cut > 0 ? limit : kNeverCut, best);
}

// Cuts the tiles that are written. Called by the first kCutThreads threads.
__device__ void cut_tiles(const TilePlan& p, const HostKnows& known, CutScratch& scratch, int num_tiles) {
  const int limit = num_tiles > kMostTilesToCut ? kNeverCut : find_limit(p, known, scratch, num_tiles);
  if (limit == kNeverCut) {
    if (threadIdx.x == 0) write_head(p, 0, kNeverCut);
    return;
  }
  const int own_thread = static_cast<int>(threadIdx.x), warp = own_thread / 32, lane = own_thread % 32;
  const Reciprocal by_limit(limit);
  const auto write = [&p](const int2& tile, int row, int count, int from, int step) {
#pragma unroll 1
    for (int i = from; i < count && row + i < p.max_pieces; i += step) {
      reinterpret_cast<int4*>(p.pieces)[1 + row + i] = {tile.x, tile.y, i, count};
    }
  };
  int before = 0;
#pragma unroll 1
  for (int base = 0; base < num_tiles; base += 32) {  // every warp adds them all up
    const int pieces = by_limit.pieces_of(scratch.units[base + lane]);
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
  if (threadIdx.x == 0) write_head(p, before, limit);
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

// The order of scheduler/varlen_tiles.h for few requests: a request's first row is the sum of the tiles of all that
// come before it. 2^n neighbouring lanes add up one request's. Sums of all tiles have 31 bits.
template <int kThreads, int kRequests>
__global__ void __launch_bounds__(kThreads)
    fmha_plan_few_kernel(const __grid_constant__ TilePlan p, const __grid_constant__ HostKnows known) {
  constexpr int kAtOnce = 4;  // requests that a lane looks at together
  static_assert(kRequests + 32 * kAtOnce <= kThreads && kThreads == kCutThreads);
  // Order, tiles; larger orders come first: of longer bins, then of earlier ones. Nobody comes after those behind.
  __shared__ int2 requests[kRequests + 32 * kAtOnce];
  __shared__ Lengths lengths[kRequests];
  __shared__ CutScratch scratch;
  __shared__ RowScratch<kThreads / 32> shared;
  __shared__ unsigned total;
  const int num_requests = p.geometry.num_requests, own = static_cast<int>(threadIdx.x);
  if (own == 0) total = 0;
  scratch.clear();
  int shift = 5;
  while (shift > 0 && num_requests << shift > kThreads) --shift;
  const int lanes = 1 << shift, request = own >> shift, part = own & (lanes - 1);
  int adders = 1;  // neighbouring lanes that add up for all of them: few requests are looked at by each
  while (adders < lanes && adders * kAtOnce < num_requests) adders *= 2;
  wait_for_earlier_kernels();
  let_next_kernel_start();
  int own_tiles = 0, order = -1;
  if (own < num_requests) {
    const Lengths its = known.lengths_of(own);
    lengths[own] = its;
    own_tiles = num_query_tiles(p, known, its.queries);
    order = (own_tiles > 0 ? bin_of(p, its, own_tiles) : 0) * kRequests + kRequests - 1 - own;
  }
  if (own < kRequests + 32 * kAtOnce) requests[own] = {order, own_tiles};
  __syncthreads();
  if (own < kRequests) {
    const unsigned sum = __reduce_add_sync(~0u, static_cast<unsigned>(own_tiles));
    if ((own & 31) == 0) atomicAdd(&total, sum);
  }
  const bool has_request = request < num_requests;
  const int2 mine = has_request ? requests[request] : int2{INT32_MAX, 0};
  int first = 0;
#pragma unroll 1
  for (int i = part & (adders - 1); i < num_requests; i += kAtOnce * adders) {
#pragma unroll
    for (int j = 0; j < kAtOnce; ++j) {
      const int2 other = requests[i + j * adders];
      if (other.x > mine.x) first += other.y;
    }
  }
#pragma unroll 1
  for (int step = adders / 2; step > 0; step /= 2) first += __shfl_xor_sync(~0u, first, step);
  const bool cuts = p.pieces != nullptr;
  const int room = min_of(mine.y, p.max_tiles - first);
  if (__all_sync(~0u, room <= 4 * lanes)) {  // a request's lanes write its rows
#pragma unroll 1
    for (int i = part; i < room; i += lanes) {
      write_row(p, cuts, scratch, request, lengths[request], mine.y, first, i);
    }
  } else {  // the warp writes those of all its requests
    const bool leads = part == 0 && has_request;
    write_rows_of_warp(p, cuts, scratch, shared, request, leads ? lengths[request] : Lengths{0, 0}, mine.y, first,
                       leads ? room : 0);
  }
  __syncthreads();
  const int num_tiles = min_of(static_cast<int>(total), p.max_tiles);
  write_no_rows<kThreads>(p, num_tiles);
  if (cuts) cut_tiles(p, known, scratch, num_tiles);
}

// Tiles of a bin that a warp's requests bring, and those of its lanes before this one: all of `same_bin` have `bin`.
struct BinTiles {
  unsigned all, before;
};

__device__ BinTiles tiles_of_bin(unsigned same_bin, unsigned tiles) {
  const unsigned earlier = same_bin & ((1u << threadIdx.x % 32) - 1);
  BinTiles sum{0, 0};
  const unsigned bits = __reduce_or_sync(~0u, tiles);
  for (unsigned rest = bits; rest != 0; rest &= rest - 1) {  // one bit of all counts at a time
    const unsigned bit = rest & -rest, have = __ballot_sync(~0u, (tiles & bit) != 0);
    sum.all += __popc(have & same_bin) * bit;
    sum.before += __popc(have & earlier) * bit;
  }
  return sum;
}

// The same for as many requests as the block has threads: a stable counting sort, weighted by tiles. A bin's first row
// is what longer bins took; earlier warps' tiles of the same bin come before a request's own. Sums have 31 bits.
template <int kThreads>
__global__ void __launch_bounds__(kThreads)
    fmha_plan_some_kernel(const __grid_constant__ TilePlan p, const __grid_constant__ HostKnows known) {
  constexpr int kWarps = kThreads / 32, kGroups = kCostBins / 32;
  static_assert(kThreads == kCostBins && kThreads == kCutThreads && kCostBins % 128 == 0);
  alignas(16) __shared__ unsigned in_warp[kWarps][kCostBins];  // tiles of a bin in a warp
  __shared__ unsigned in_bin[kCostBins], before_in_group[kCostBins];
  alignas(16) __shared__ unsigned in_group[kGroups];  // of 32 bins
  __shared__ CutScratch scratch;
  __shared__ RowScratch<kWarps> shared;
  const int own = static_cast<int>(threadIdx.x), warp = own / 32, lane = own % 32;
  for (int i = 4 * lane; i < kCostBins; i += 128) *reinterpret_cast<uint4*>(&in_warp[warp][i]) = {0, 0, 0, 0};
  in_bin[own] = 0;
  scratch.clear();
  __syncthreads();
  wait_for_earlier_kernels();
  let_next_kernel_start();

  const Lengths lengths = own < p.geometry.num_requests ? known.lengths_of(own) : Lengths{0, 0};
  const int tiles = num_query_tiles(p, known, lengths.queries);
  const int bin = tiles > 0 ? bin_of(p, lengths, tiles) : -1;
  const unsigned same_bin = __match_any_sync(~0u, bin);
  const BinTiles sum = tiles_of_bin(same_bin, tiles);
  if (bin >= 0 && __ffs(static_cast<int>(same_bin)) - 1 == lane) {
    in_warp[warp][bin] = sum.all;
    atomicAdd(&in_bin[bin], sum.all);
  }
  __syncthreads();

  // A thread for each bin, the longest first, a warp for each group.
  const unsigned count = in_bin[kCostBins - 1 - own];
  unsigned through = count;
#pragma unroll
  for (int step = 1; step < 32; step *= 2) {
    const unsigned other = __shfl_up_sync(~0u, through, step);
    if (lane >= step) through += other;
  }
  before_in_group[kCostBins - 1 - own] = through - count;
  if (lane == 31) in_group[warp] = through;
  __syncthreads();

  const int from_longest = kCostBins - 1 - max_of(bin, 0);
  unsigned row = before_in_group[max_of(bin, 0)] + sum.before, total = 0;
#pragma unroll
  for (int i = 0; i < kGroups; ++i) {
    if (i < from_longest / 32) row += in_group[i];
    total += in_group[i];
  }
#pragma unroll
  for (int w = 0; w < kWarps - 1; ++w) {
    if (w < warp) row += in_warp[w][max_of(bin, 0)];
  }
  const bool cuts = p.pieces != nullptr;
  const int first = static_cast<int>(row), room = max_of(min_of(tiles, p.max_tiles - first), 0);
  const int num_tiles = min_of(static_cast<int>(total), p.max_tiles);
  write_rows_of_warp(p, cuts && num_tiles <= kMostTilesToCut, scratch, shared, own, lengths, tiles, first, room);
  write_no_rows<kThreads>(p, num_tiles);
  if (!cuts) return;
  __syncthreads();
  cut_tiles(p, known, scratch, num_tiles);
}

// The same for any number of requests: a stable counting sort in one CTA, weighted by their tiles. A warp has a run of
// neighbouring requests. It counts the tiles of each bin; a bin's first row in a warp is what longer bins, and earlier
// warps of the same bin, took. Then the warp goes through its requests again, in order.
template <int kThreads>
__global__ void __launch_bounds__(kThreads)
    fmha_plan_many_kernel(const __grid_constant__ TilePlan p, const __grid_constant__ HostKnows known) {
  constexpr int kWarps = kThreads / 32, kAhead = 4;
  static_assert(kThreads >= kCostBins && kCostBins % 32 == 0);
  __shared__ unsigned next_row[kWarps][kCostBins];  // tiles of a bin in a warp, then its next row
  __shared__ CutScratch scratch;
  __shared__ RowScratch<kWarps> shared;
  const int num_requests = p.geometry.num_requests;
  const bool cuts = p.pieces != nullptr && num_requests <= kMostRequestsToCut;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  unsigned* const own_rows = next_row[warp];

  for (int i = lane; i < kCostBins; i += 32) own_rows[i] = 0;
  scratch.clear();
  __syncwarp();
  wait_for_earlier_kernels();
  let_next_kernel_start();
  const int each = ceil_div(ceil_div(num_requests, kWarps), 32) * 32;  // requests of a warp
  const int begin = min_of(warp * each, num_requests), end = min_of(begin + each, num_requests);
  // visit(request, its lengths, tiles and bin) for 32 requests at a time, in order; whoever has no tile has bin -1.
  // Some are asked for before the first is looked at.
  const auto for_each_request = [&](const auto& visit) {
    for (int base = begin; base < end; base += 32 * kAhead) {
      Lengths lengths[kAhead];
#pragma unroll
      for (int i = 0; i < kAhead; ++i) {
        const int b = base + 32 * i + lane;
        lengths[i] = b < end ? known.lengths_of(b) : Lengths{0, 0};
      }
#pragma unroll
      for (int i = 0; i < kAhead; ++i) {
        if (base + 32 * i >= end) break;
        const int tiles = num_query_tiles(p, known, lengths[i].queries);
        visit(base + 32 * i + lane, lengths[i], tiles, tiles > 0 ? bin_of(p, lengths[i], tiles) : -1);
      }
    }
  };
  for_each_request([&](int, const Lengths&, int tiles, int bin) {
    const unsigned same_bin = __match_any_sync(~0u, bin);
    const BinTiles sum = tiles_of_bin(same_bin, tiles);
    if (bin >= 0 && __ffs(static_cast<int>(same_bin)) - 1 == lane) own_rows[bin] += sum.all;
    __syncwarp();
  });
  __syncthreads();

  const int own_bin = kCostBins - 1 - static_cast<int>(threadIdx.x);  // the longest come first
  const int warps = ceil_div(num_requests, each > 0 ? each : 1);      // that have requests
  unsigned in_bin = 0;
  if (own_bin >= 0) {
#pragma unroll 8
    for (int w = 0; w < warps; ++w) in_bin += next_row[w][own_bin];
  }
  unsigned first;
  const int total = static_cast<int>(block_exclusive_sum<kThreads>(in_bin, &first));
  if (own_bin >= 0) {
#pragma unroll 8
    for (int w = 0; w < warps; ++w) {
      const unsigned count = next_row[w][own_bin];
      next_row[w][own_bin] = first;
      first += count;
    }
  }
  __syncthreads();

  const bool notes = cuts && static_cast<unsigned>(total) <= kMostTilesToCut;  // tiles may be cut
  for_each_request([&](int request, const Lengths& lengths, int tiles, int bin) {
    const unsigned same_bin = __match_any_sync(~0u, bin);
    const BinTiles sum = tiles_of_bin(same_bin, tiles);
    const unsigned row = bin >= 0 ? own_rows[bin] + sum.before : 0;
    __syncwarp();
    if (bin >= 0 && __ffs(static_cast<int>(same_bin)) - 1 == lane) own_rows[bin] += sum.all;
    __syncwarp();
    // Rows that there is room for: sums of hostile lengths go round.
    const int room = row < static_cast<unsigned>(p.max_tiles) ? min_of(tiles, p.max_tiles - static_cast<int>(row)) : 0;
    write_rows_of_warp(p, notes, scratch, shared, request, lengths, tiles, static_cast<int>(row), room);
  });
  write_no_rows<kThreads>(p, total);
  if (cuts) {
    __syncthreads();
    if (threadIdx.x >= kCutThreads) return;
    cut_tiles(p, known, scratch,
              static_cast<int>(min_of(static_cast<unsigned>(total), static_cast<unsigned>(p.max_tiles))));
  } else if (p.pieces != nullptr && threadIdx.x == 0) {
    write_head(p, 0, kNeverCut);
  }
}

}  // namespace

void launch_plan(const TilePlan& p, CUstream_st* stream) {
  constexpr int kMaxRequests = 16384, kFewRequests = 64, kThreads = kCutThreads, kManyThreads = 1024;
  const int requests = p.geometry.num_requests;
  if (requests > kMaxRequests) {
    throw std::runtime_error("attnops::fmha_plan: cu_seqlens_q.shape[0] (batch_size + 1) must be at most " +
                             std::to_string(kMaxRequests + 1) + ", got " + std::to_string(requests + 1));
  }
  const int num_sms = p.num_sms > 0 ? p.num_sms : device_sms("fmha_plan");
  const HostKnows known(p, num_sms);
  // One SM issues it all: fewer warps wait less for each other.
  if (requests > kThreads || p.max_tiles >= INT32_MAX / kThreads) {  // sums of hostile lengths go round
    launch_dependent<&fmha_plan_many_kernel<kManyThreads>>("fmha_plan", {1, kManyThreads, 0, 0}, stream, p, known);
  } else if (requests <= kFewRequests) {
    launch_dependent<&fmha_plan_few_kernel<kThreads, kFewRequests>>("fmha_plan", {1, kThreads, 0, 0}, stream, p, known);
  } else {
    launch_dependent<&fmha_plan_some_kernel<kThreads>>("fmha_plan", {1, kThreads, 0, 0}, stream, p, known);
  }
}

}  // namespace attnops::fmha
