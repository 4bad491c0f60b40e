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

__device__ Lengths lengths_of(const TilePlan& p, int request) {
  const int queries = p.cu_seqlens_q[request + 1] - p.cu_seqlens_q[request];
  const int keys = p.cu_seqlens_k != nullptr    ? p.cu_seqlens_k[request + 1] - p.cu_seqlens_k[request]
                   : p.cache_seqlens != nullptr ? p.cache_seqlens[request]
                                                : queries;
  return {queries, keys};
}

__device__ int num_query_tiles(const TilePlan& p, int queries) {
  // No more than the plan has rows for: hostile lengths must not overflow.
  if (queries <= p.geometry.tile_q) return queries > 0 ? 1 : 0;  // divisions are long
  return min_of(static_cast<int>(static_cast<unsigned>(queries - 1) / static_cast<unsigned>(p.geometry.tile_q)) + 1,
                p.max_tiles + 1);
}

// Bin of a request: of its last tile.
__device__ int bin_of(const TilePlan& p, const Lengths& lengths, int num_tiles) {
  return cost_bin(varlen_tile_cost(p.geometry, lengths.queries, lengths.keys, num_tiles - 1));
}

template <int kThreads>
__device__ void write_no_rows(const TilePlan& p, int from) {
  for (int n = max_of(from, 0) + static_cast<int>(threadIdx.x); n < p.max_tiles; n += kThreads) {
    reinterpret_cast<int2*>(p.tile_order)[n] = {-1, -1};
  }
}

__device__ void write_head(const TilePlan& p, int pieces, int limit) {
  *reinterpret_cast<int4*>(p.pieces) = {pieces, limit, 0, 0};
}

// The limit of scheduler/varlen_cuts.h: a warp for some candidates, a lane for every 32nd tile. `units` of all tiles
// lie in shared memory. Called by the whole block; all get the limit.
template <int kThreads>
__device__ int find_limit(const TilePlan& p, int num_sms, const int32_t* units, int num_tiles) {
  constexpr int kWarps = kThreads / 32, kEach = kCutCandidates / kWarps;  // candidates of a warp
  static_assert(kCutCandidates == 32 && kCutCandidates % kWarps == 0);
  __shared__ int warp_sum[kWarps], warp_longest[kWarps], warp_shortest[kWarps], limits[kCutCandidates];
  __shared__ int64_t estimates[kCutCandidates];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  int sum = 0, longest = 0, shortest = kNeverCut;
  for (int tile = static_cast<int>(threadIdx.x); tile < num_tiles; tile += kThreads) {
    sum += units[tile];
    longest = max_of(longest, units[tile]);
    shortest = min_of(shortest, units[tile]);
  }
  sum = __reduce_add_sync(~0u, sum);
  longest = __reduce_max_sync(~0u, longest);
  shortest = __reduce_min_sync(~0u, shortest);
  if (lane == 0) {
    warp_sum[warp] = sum;
    warp_longest[warp] = longest;
    warp_shortest[warp] = shortest;
  }
  __syncthreads();
  const int other = lane % kWarps;
  const CutProblem problem{.works_per_tile = p.works_per_tile,
                           .num_sms = num_sms,
                           .max_pieces = p.max_pieces,
                           .num_tiles = num_tiles,
                           .longest = __reduce_max_sync(~0u, warp_longest[other]),
                           // 512 tiles of 2^21 units at most
                           .total_units = __reduce_add_sync(~0u, lane < kWarps ? warp_sum[other] : 0)};
  if (num_tiles == 0 || !worth_cutting(problem, __reduce_min_sync(~0u, warp_shortest[other]))) return kNeverCut;
  const int own_limit = cut_limit(problem, warp * kEach + lane % kEach);
  CutTally tallies[kEach];
  int limit[kEach];
#pragma unroll
  for (int i = 0; i < kEach; ++i) limit[i] = __shfl_sync(~0u, own_limit, i);
  for (int tile = lane; tile < num_tiles; tile += 32) {
    const int of_tile = units[tile];
#pragma unroll
    for (int i = 0; i < kEach; ++i) tallies[i].add(of_tile, limit[i]);
  }
  CutTally tally;
#pragma unroll
  for (int i = 0; i < kEach; ++i) {
    const int pieces = __reduce_add_sync(~0u, tallies[i].pieces), cut = __reduce_add_sync(~0u, tallies[i].cut);
    const int least = __reduce_min_sync(~0u, tallies[i].shortest);
    if (lane == i) {
      tally.pieces = pieces;
      tally.cut = cut;
      tally.shortest = least;
    }
  }
  if (lane < kEach) {
    const int64_t estimate = cut_estimate(problem, tally, own_limit);
    estimates[warp * kEach + lane] = estimate < 0 ? INT64_MAX : estimate;
    limits[warp * kEach + lane] = tally.cut > 0 ? own_limit : kNeverCut;
  }
  __syncthreads();
  // The first of the least: by the upper halves, then the lower ones of those.
  const uint64_t estimate = static_cast<uint64_t>(estimates[lane]);  // not negative
  const auto upper = static_cast<unsigned>(estimate >> 32), lower = static_cast<unsigned>(estimate);
  const unsigned least_upper = __reduce_min_sync(~0u, upper);
  const unsigned least_lower = __reduce_min_sync(~0u, upper == least_upper ? lower : ~0u);
  const int best = __ffs(static_cast<int>(__ballot_sync(~0u, upper == least_upper && lower == least_lower))) - 1;
  return estimates[best] == INT64_MAX ? kNeverCut : limits[best];
}

// Cuts the tiles that are written. `rows`: what of them is in shared memory, too.
template <int kThreads>
__device__ void cut_tiles(const TilePlan& p, int num_sms, const int32_t* units, int num_tiles,
                          const int2* rows = nullptr) {
  if (num_tiles > kMostTilesToCut) {
    if (threadIdx.x == 0) write_head(p, 0, kNeverCut);
    return;
  }
  const int limit = find_limit<kThreads>(p, num_sms, units, num_tiles);
  if (limit == kNeverCut) {
    if (threadIdx.x == 0) write_head(p, 0, kNeverCut);
    return;
  }
  const int lane = static_cast<int>(threadIdx.x) % 32;
  int total = 0;
#pragma unroll 1
  for (int base = 0; base < num_tiles; base += kThreads) {
    const int own = base + static_cast<int>(threadIdx.x), pieces = own < num_tiles ? pieces_of(units[own], limit) : 1;
    int first;
    const int here = block_exclusive_sum<kThreads>(pieces > 1 ? pieces : 0, &first);
    first += total;
    total += here;
    const int2* const tiles = rows != nullptr ? rows : reinterpret_cast<const int2*>(p.tile_order);
    const int2 tile = pieces > 1 ? tiles[own] : int2{0, 0};
    for (unsigned rest = __ballot_sync(~0u, pieces > 1); rest != 0; rest &= rest - 1) {
      const int from = __ffs(static_cast<int>(rest)) - 1, count = __shfl_sync(~0u, pieces, from);
      const int row = __shfl_sync(~0u, first, from), request = __shfl_sync(~0u, tile.x, from),
                query_tile = __shfl_sync(~0u, tile.y, from);
      for (int i = lane; i < count && row + i < p.max_pieces; i += 32) {
        reinterpret_cast<int4*>(p.pieces)[1 + row + i] = {request, query_tile, i, count};
      }
    }
  }
  if (threadIdx.x == 0) write_head(p, total, limit);
}

// Tiles of all requests that come before the one of order `own`, by `step` lanes: this one looks at requests `from`,
// `from` + `step` and so on. Requests: order, tiles.
template <typename Sum>
__device__ int64_t tiles_before(const int2* requests, int own, int from, int step, int num_requests) {
  Sum sum = 0;
#pragma unroll 8
  for (int i = from; i < num_requests; i += step) {
    const int2 other = requests[i];
    if (other.x > own) sum += other.y;
  }
  for (int lanes = step / 2; lanes > 0; lanes /= 2) sum += __shfl_xor_sync(~0u, sum, lanes);
  return sum;
}

// The order of scheduler/varlen_tiles.h for few requests, up to kThreads: a request's first row is the sum of the tiles
// of all that come before it. 2^n neighbouring lanes add up one request's.
template <int kThreads>
__global__ void __launch_bounds__(kThreads) fmha_plan_few_kernel(const __grid_constant__ TilePlan p, int num_sms) {
  static_assert(int64_t{kCostBins} * kThreads <= INT32_MAX);
  __shared__ int2 requests[kThreads];  // order, tiles; larger orders come first: of longer bins, then of earlier ones
  __shared__ Lengths lengths[kThreads];
  __shared__ int32_t units[kMostTilesToCut];
  __shared__ int2 rows[kMostTilesToCut];
  __shared__ unsigned long long total;
  const int num_requests = p.geometry.num_requests, own = static_cast<int>(threadIdx.x), lane = own % 32;
  if (own == 0) total = 0;
  int lanes = 32;
  while (lanes > 1 && lanes * num_requests > kThreads) lanes /= 2;
  wait_for_earlier_kernels();
  let_next_kernel_start();
  int own_tiles = 0;
  if (own < num_requests) {
    lengths[own] = lengths_of(p, own);
    own_tiles = num_query_tiles(p, lengths[own].queries);
    const int bin = own_tiles > 0 ? bin_of(p, lengths[own], own_tiles) : 0;
    requests[own] = {bin * kThreads + kThreads - 1 - own, own_tiles};
  }
  __syncthreads();
  const bool fits = p.max_tiles < INT32_MAX / kThreads;  // sums of tiles have 31 bits
  if (own - lane < num_requests) {
    if (fits) {
      const unsigned sum = __reduce_add_sync(~0u, static_cast<unsigned>(own_tiles));
      if (lane == 0) atomicAdd(reinterpret_cast<unsigned*>(&total), sum);
    } else {
      int64_t sum = own_tiles;
      for (int step = 16; step > 0; step /= 2) sum += __shfl_xor_sync(~0u, sum, step);
      if (lane == 0) atomicAdd(&total, static_cast<unsigned long long>(sum));
    }
  }
  const int request = own / lanes, part = own % lanes;
  const int2 mine = request < num_requests ? requests[request] : int2{INT32_MAX, 0};
  const int64_t first = fits ? tiles_before<int>(requests, mine.x, part, lanes, num_requests)
                             : tiles_before<int64_t>(requests, mine.x, part, lanes, num_requests);
  const auto write_row = [&](int r, int tiles, int64_t row, int i) {
    if (row + i >= p.max_tiles) return;
    reinterpret_cast<int2*>(p.tile_order)[row + i] = {r, tiles - 1 - i};
    if (row + i < kMostTilesToCut && p.pieces != nullptr) {
      rows[row + i] = {r, tiles - 1 - i};
      units[row + i] = cost_units(varlen_tile_cost(p.geometry, lengths[r].queries, lengths[r].keys, tiles - 1 - i));
    }
  };
  if (__all_sync(~0u, mine.y <= 4 * lanes)) {  // a request's lanes write its rows
    for (int i = part; i < mine.y; i += lanes) write_row(request, mine.y, first, i);
  } else {  // the warp writes those of all its requests
    for (int from = 0; from < 32; from += lanes) {
      const int tiles = __shfl_sync(~0u, mine.y, from);
      const int64_t row = __shfl_sync(~0u, first, from);
      for (int i = lane; i < tiles; i += 32) write_row((own - lane + from) / lanes, tiles, row, i);
    }
  }
  __syncthreads();
  const int num_tiles = static_cast<int>(min_of<int64_t>(static_cast<int64_t>(total), p.max_tiles));
  write_no_rows<kThreads>(p, num_tiles);
  if (p.pieces != nullptr) cut_tiles<kThreads>(p, num_sms, units, num_tiles, rows);
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

// The same for any number of requests: a stable counting sort in one CTA, weighted by their tiles. A warp has a run of
// neighbouring requests. It counts the tiles of each bin; a bin's first row in a warp is what longer bins, and earlier
// warps of the same bin, took. Then the warp goes through its requests again, in order.
template <int kThreads>
__global__ void __launch_bounds__(kThreads) fmha_plan_many_kernel(const __grid_constant__ TilePlan p, int num_sms) {
  constexpr int kWarps = kThreads / 32, kAhead = 4;
  static_assert(kThreads >= kCostBins && kCostBins % 32 == 0);
  __shared__ unsigned next_row[kWarps][kCostBins];  // tiles of a bin in a warp, then its next row
  __shared__ int32_t units[kMostTilesToCut];
  const int num_requests = p.geometry.num_requests;
  const bool cuts = p.pieces != nullptr && num_requests <= kMostRequestsToCut;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  unsigned* const own_rows = next_row[warp];

  for (int i = lane; i < kCostBins; i += 32) own_rows[i] = 0;
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
        lengths[i] = b < end ? lengths_of(p, b) : Lengths{0, 0};
      }
#pragma unroll
      for (int i = 0; i < kAhead; ++i) {
        if (base + 32 * i >= end) break;
        const int tiles = num_query_tiles(p, lengths[i].queries);
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

  const auto write_row = [&](int request, const Lengths& lengths, int tiles, int row, int i) {
    reinterpret_cast<int2*>(p.tile_order)[row + i] = {request, tiles - 1 - i};
    if (cuts && row + i < kMostTilesToCut) {
      units[row + i] = cost_units(varlen_tile_cost(p.geometry, lengths.queries, lengths.keys, tiles - 1 - i));
    }
  };
  for_each_request([&](int request, const Lengths& lengths, int tiles, int bin) {
    const unsigned same_bin = __match_any_sync(~0u, bin);
    const BinTiles sum = tiles_of_bin(same_bin, tiles);
    const unsigned row = bin >= 0 ? own_rows[bin] + sum.before : 0;
    __syncwarp();
    if (bin >= 0 && __ffs(static_cast<int>(same_bin)) - 1 == lane) own_rows[bin] += sum.all;
    __syncwarp();
    // Rows that there is room for: sums of hostile lengths go round.
    const int room = row < static_cast<unsigned>(p.max_tiles) ? min_of(tiles, p.max_tiles - static_cast<int>(row)) : 0;
    if (__all_sync(~0u, room <= 4)) {  // each lane writes its own rows
      for (int i = 0; i < room; ++i) write_row(request, lengths, tiles, static_cast<int>(row), i);
      return;
    }
    for (unsigned rest = __ballot_sync(~0u, room > 0); rest != 0; rest &= rest - 1) {  // the warp writes all
      const int from = __ffs(static_cast<int>(rest)) - 1;
      const int of = __shfl_sync(~0u, request, from), count = __shfl_sync(~0u, tiles, from),
                shown = __shfl_sync(~0u, room, from), at = __shfl_sync(~0u, static_cast<int>(row), from);
      const Lengths its{__shfl_sync(~0u, lengths.queries, from), __shfl_sync(~0u, lengths.keys, from)};
      for (int i = lane; i < shown; i += 32) write_row(of, its, count, at, i);
    }
  });
  write_no_rows<kThreads>(p, total);
  if (cuts) {
    __syncthreads();  // units, and rows that are read again
    cut_tiles<kThreads>(p, num_sms, units,
                        static_cast<int>(min_of(static_cast<unsigned>(total), static_cast<unsigned>(p.max_tiles))));
  } else if (p.pieces != nullptr && threadIdx.x == 0) {
    write_head(p, 0, kNeverCut);
  }
}

}  // namespace

void launch_plan(const TilePlan& p, CUstream_st* stream) {
  constexpr int kMaxRequests = 16384, kFewRequests = 128, kFewThreads = 256, kManyThreads = 1024;
  const int requests = p.geometry.num_requests;
  if (requests > kMaxRequests) {
    throw std::runtime_error("attnops::fmha_plan: cu_seqlens_q.shape[0] (batch_size + 1) must be at most " +
                             std::to_string(kMaxRequests + 1) + ", got " + std::to_string(requests + 1));
  }
  const int num_sms = p.num_sms > 0 ? p.num_sms : device_sms("fmha_plan");
  if (requests <= kFewRequests) {  // one SM issues it all: fewer warps wait less for each other
    launch_dependent<&fmha_plan_few_kernel<kFewThreads>>("fmha_plan", {1, kFewThreads, 0, 0}, stream, p, num_sms);
  } else {
    launch_dependent<&fmha_plan_many_kernel<kManyThreads>>("fmha_plan", {1, kManyThreads, 0, 0}, stream, p, num_sms);
  }
}

}  // namespace attnops::fmha
