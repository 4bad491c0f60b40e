#include <stdexcept>
#include <string>

#include "device/common/block_scan.cuh"
#include "device/common/launch.h"
#include "fmha/cuda/plan.h"

namespace attnops::fmha {
namespace {

__device__ int seqlen_q(const TilePlan& p, int request) {
  return p.cu_seqlens_q[request + 1] - p.cu_seqlens_q[request];
}

__device__ int num_query_tiles(const TilePlan& p, int request) {
  const int length = seqlen_q(p, request);
  return length > 0 ? (length - 1) / p.geometry.tile_q + 1 : 0;
}

// Of lengths that no batch has there may be more tiles than an int counts.
__device__ int clamp_tiles(int64_t tiles) { return static_cast<int>(min_of(tiles, int64_t{1} << 30)); }

struct Tile {
  int request, index;
};

__device__ int bin_of(const TilePlan& p, Tile tile) {
  const int queries = seqlen_q(p, tile.request);
  const int keys = p.cu_seqlens_k != nullptr    ? p.cu_seqlens_k[tile.request + 1] - p.cu_seqlens_k[tile.request]
                   : p.cache_seqlens != nullptr ? p.cache_seqlens[tile.request]
                                                : queries;
  return cost_bin(varlen_tile_cost(p.geometry, queries, keys, tile.index));
}

// Tile n of the batch's natural order. tile_start [B + 1]: tiles of the requests before b.
__device__ Tile tile_at(const int32_t* tile_start, int num_requests, int n) {
  int low = 0, high = num_requests;  // tile_start[low] <= n < tile_start[high]
  while (high - low > 1) {
    const int middle = (low + high) / 2;
    (tile_start[middle] <= n ? low : high) = middle;
  }
  return {low, n - tile_start[low]};
}

// The order of scheduler/varlen_tiles.h as a stable counting sort in one CTA: tiles of the batch per request by a scan,
// a histogram of their bins, and then rounds of one tile per thread. Within a round a tile's place in its bin is what
// earlier rounds, earlier warps and earlier lanes took of that bin.
template <int kThreads>
__global__ void __launch_bounds__(kThreads) fmha_plan_kernel(const __grid_constant__ TilePlan p) {
  static_assert(kThreads >= kCostBins);
  constexpr int kWarps = kThreads / 32;
  extern __shared__ int32_t tile_start[];           // [B + 1]
  __shared__ int32_t bin_next[kCostBins];           // count of a bin, then its next free place
  __shared__ int32_t warp_next[kWarps][kCostBins];  // per round: count of a bin in a warp, then its place
  const int num_requests = p.geometry.num_requests;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;

  const int each = ceil_div(num_requests, kThreads);
  const int begin = min_of(static_cast<int>(threadIdx.x) * each, num_requests);
  const int end = min_of(begin + each, num_requests);
  int64_t tiles = 0;
  for (int b = begin; b < end; ++b) tiles += num_query_tiles(p, b);
  int64_t before;
  const int total = clamp_tiles(block_exclusive_sum<kThreads>(tiles, &before));
  for (int b = begin; b < end; ++b) {
    tile_start[b] = clamp_tiles(before);
    before += num_query_tiles(p, b);
  }
  if (threadIdx.x == 0) tile_start[num_requests] = total;
  if (threadIdx.x < kCostBins) bin_next[threadIdx.x] = 0;
  __syncthreads();

  for (int n = threadIdx.x; n < total; n += kThreads) {
    atomicAdd(&bin_next[bin_of(p, tile_at(tile_start, num_requests, n))], 1);
  }
  __syncthreads();
  const int own_bin = kCostBins - 1 - static_cast<int>(threadIdx.x);  // the longest come first
  int first;
  block_exclusive_sum<kThreads>(own_bin >= 0 ? bin_next[own_bin] : 0, &first);
  if (own_bin >= 0) bin_next[own_bin] = first;

  for (int base = 0; base < total; base += kThreads) {
    for (int i = lane; i < kCostBins; i += 32) warp_next[warp][i] = 0;
    const int n = base + threadIdx.x;
    const bool active = n < total;
    const Tile tile = active ? tile_at(tile_start, num_requests, n) : Tile{-1, -1};
    const int bin = active ? bin_of(p, tile) : -1;
    __syncwarp();
    const unsigned same_bin = __match_any_sync(~0u, bin);
    const int rank = __popc(same_bin & ((1u << lane) - 1));
    if (active && rank == 0) warp_next[warp][bin] = __popc(same_bin);
    __syncthreads();
    if (threadIdx.x < kCostBins) {
      int next = bin_next[threadIdx.x];
      for (int w = 0; w < kWarps; ++w) {
        const int count = warp_next[w][threadIdx.x];
        warp_next[w][threadIdx.x] = next;
        next += count;
      }
      bin_next[threadIdx.x] = next;
    }
    __syncthreads();
    const int place = active ? warp_next[warp][bin] + rank : p.max_tiles;
    if (place < p.max_tiles) {
      p.tile_order[2 * place] = tile.request;
      p.tile_order[2 * place + 1] = tile.index;
    }
    __syncwarp();  // the next round clears this warp's counts; bin_next is read after its barrier
  }
  for (int n = total + threadIdx.x; n < p.max_tiles; n += kThreads) {
    p.tile_order[2 * n] = -1;
    p.tile_order[2 * n + 1] = -1;
  }
}

template <int kThreads>
void launch_plan_as(const TilePlan& p, CUstream_st* stream) {
  const size_t bytes = (p.geometry.num_requests + 1) * sizeof(int32_t);
  constexpr size_t kAlwaysThere = 28 * 1024;  // 48 KB less the counts
  if (bytes > kAlwaysThere) {
    check_cuda(cudaFuncSetAttribute(&fmha_plan_kernel<kThreads>, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                    static_cast<int>(bytes)),
               "shared memory for the plan of so large a batch");
  }
  fmha_plan_kernel<kThreads><<<1, kThreads, bytes, stream>>>(p);
  check_cuda(cudaGetLastError(), "fmha_plan_kernel");
}

}  // namespace

void launch_plan(const TilePlan& p, CUstream_st* stream) {
  constexpr int kMaxRequests = 16384;  // 64 KB of shared memory beside the counts
  if (p.geometry.num_requests > kMaxRequests) {
    throw std::runtime_error("attnops::fmha_plan: cu_seqlens_q.shape[0] (batch_size + 1) must be at most " +
                             std::to_string(kMaxRequests + 1) + ", got " + std::to_string(p.geometry.num_requests + 1));
  }
  p.max_tiles <= 1024 ? launch_plan_as<256>(p, stream) : launch_plan_as<512>(p, stream);
}

}  // namespace attnops::fmha
