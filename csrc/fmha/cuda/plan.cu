#include <stdexcept>
#include <string>

#include "device/common/block_scan.cuh"
#include "device/common/capability.h"
#include "device/common/launch_dependent.cuh"
#include "device/common/pdl.cuh"
#include "fmha/cuda/plan.h"
#include "fmha/cuda/plan_cuts.cuh"
#include "fmha/cuda/plan_rows.cuh"
#include "scheduler/varlen_cuts.h"

namespace attnops::fmha {
namespace {

constexpr int kMostRequestsToCut = 1024;  // tiles of more requests are left whole

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
  __shared__ unsigned total, tokens;  // of all requests
  const int num_requests = p.geometry.num_requests, own = static_cast<int>(threadIdx.x);
  if (own == 0) total = tokens = 0;
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
    const unsigned own_tokens = own < num_requests ? static_cast<unsigned>(lengths[own].queries) : 0;
    const unsigned sum_of_tokens = __reduce_add_sync(~0u, own_tokens);
    if ((own & 31) == 0) {
      atomicAdd(&total, sum);
      atomicAdd(&tokens, sum_of_tokens);
    }
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
  if (cuts) cut_tiles(p, known, scratch, num_tiles, static_cast<int>(tokens));
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
  const int tokens = known.tokens_of(p.geometry.num_requests);
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
  cut_tiles(p, known, scratch, num_tiles, tokens);
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
  const int tokens = known.tokens_of(num_requests);
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
              static_cast<int>(min_of(static_cast<unsigned>(total), static_cast<unsigned>(p.max_tiles))), tokens);
  } else if (p.pieces != nullptr && threadIdx.x == 0) {
    write_head(p, 0, Cut{});
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
  // Two CTAs of the kernels of sm_80 share an SM. Hopper's have one each.
  const int ctas = usable_sm("fmha_plan") == 90 ? 1 : 2;
  const HostKnows known(p, p.num_sms > 0 ? p.num_sms : ctas * device_sms("fmha_plan"));
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
