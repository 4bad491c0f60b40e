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
  // No more than the plan has rows for: hostile lengths must not overflow.
  return length > 0 ? min_of((length - 1) / p.geometry.tile_q + 1, p.max_tiles + 1) : 0;
}

// Bin of a request: of its last tile.
__device__ int bin_of(const TilePlan& p, int request, int num_tiles) {
  const int queries = seqlen_q(p, request);
  const int keys = p.cu_seqlens_k != nullptr    ? p.cu_seqlens_k[request + 1] - p.cu_seqlens_k[request]
                   : p.cache_seqlens != nullptr ? p.cache_seqlens[request]
                                                : queries;
  return cost_bin(varlen_tile_cost(p.geometry, queries, keys, num_tiles - 1));
}

// The order of scheduler/varlen_tiles.h as a stable counting sort of requests in one CTA, weighted by their tiles: a
// histogram of bins, then rounds of one request per thread. Within a round a request's place in its bin is what earlier
// rounds, earlier warps and earlier lanes took of that bin. Then a warp writes a request's rows.
template <int kThreads>
__global__ void __launch_bounds__(kThreads) fmha_plan_kernel(const __grid_constant__ TilePlan p) {
  static_assert(kThreads >= kCostBins);
  constexpr int kWarps = kThreads / 32;
  extern __shared__ int32_t first_row[];            // [B]
  __shared__ int32_t bin_next[kCostBins];           // tiles of a bin, then its next free row
  __shared__ int32_t warp_next[kWarps][kCostBins];  // per round: tiles of a bin in a warp, then its place
  __shared__ int32_t lane_tiles[kThreads];
  const int num_requests = p.geometry.num_requests;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;

  if (threadIdx.x < kCostBins) bin_next[threadIdx.x] = 0;
  __syncthreads();
  for (int b = threadIdx.x; b < num_requests; b += kThreads) {
    const int tiles = num_query_tiles(p, b);
    if (tiles > 0) atomicAdd(&bin_next[bin_of(p, b, tiles)], tiles);
  }
  __syncthreads();
  const int own_bin = kCostBins - 1 - static_cast<int>(threadIdx.x);  // the longest come first
  int first;
  const int total = block_exclusive_sum<kThreads>(own_bin >= 0 ? bin_next[own_bin] : 0, &first);
  if (own_bin >= 0) bin_next[own_bin] = first;

  for (int base = 0; base < num_requests; base += kThreads) {
    for (int i = lane; i < kCostBins; i += 32) warp_next[warp][i] = 0;
    const int b = base + static_cast<int>(threadIdx.x);
    const int tiles = b < num_requests ? num_query_tiles(p, b) : 0;
    const int bin = tiles > 0 ? bin_of(p, b, tiles) : -1;
    lane_tiles[threadIdx.x] = tiles;
    __syncwarp();
    const unsigned same_bin = __match_any_sync(~0u, bin);
    int before = 0, all = 0;
    for (unsigned rest = bin >= 0 ? same_bin : 0; rest != 0; rest &= rest - 1) {
      const int other = __ffs(static_cast<int>(rest)) - 1;
      if (other < lane) before += lane_tiles[warp * 32 + other];
      all += lane_tiles[warp * 32 + other];
    }
    if (bin >= 0 && __ffs(static_cast<int>(same_bin)) - 1 == lane) warp_next[warp][bin] = all;
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
    if (b < num_requests) first_row[b] = bin >= 0 ? warp_next[warp][bin] + before : 0;
    __syncwarp();  // the next round clears this warp's counts; bin_next is read after its barrier
  }
  __syncthreads();

  for (int b = warp; b < num_requests; b += kWarps) {
    const int tiles = num_query_tiles(p, b);
    for (int i = lane; i < tiles; i += 32) {
      const int64_t row = static_cast<int64_t>(first_row[b]) + i;
      if (row < 0 || row >= p.max_tiles) break;
      p.tile_order[2 * row] = b;
      p.tile_order[2 * row + 1] = tiles - 1 - i;
    }
  }
  for (int n = max_of(total, 0) + static_cast<int>(threadIdx.x); n < p.max_tiles; n += kThreads) {
    p.tile_order[2 * n] = -1;
    p.tile_order[2 * n + 1] = -1;
  }
}

template <int kThreads>
void launch_plan_as(const TilePlan& p, CUstream_st* stream) {
  const size_t bytes = p.geometry.num_requests * sizeof(int32_t);
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
