#pragma once
#include <cuda_runtime_api.h>

#include <cstdint>
#include <stdexcept>
#include <string>

#include "core/math.h"
#include "device/common/block_scan.cuh"
#include "device/common/launch.h"
#include "scheduler/split_kv.h"

namespace attnops {

// The split-KV plan in one small launch: the rows and num_splits of scheduler/split_kv.h, bit for bit.
//
// One CTA. Every thread adds up the costs of a run of neighbouring requests, a block scan turns the sums into the cost
// prefix in shared memory, and then every thread makes rows, each from the prefix alone.
template <int kThreads>
__global__ void __launch_bounds__(kThreads)
    split_kv_plan_kernel(const __grid_constant__ SplitKvGeometry g, const int32_t* __restrict__ cache_seqlens,
                         SplitKvEntry* __restrict__ entries, int32_t* __restrict__ num_splits) {
  extern __shared__ int64_t shared[];
  int64_t* const prefix = shared;                                                  // [B + 1]
  int32_t* const tiles = reinterpret_cast<int32_t*>(prefix + g.num_requests + 1);  // [B]

  const int each = ceil_div(g.num_requests, kThreads);
  const int begin = min_of(static_cast<int>(threadIdx.x) * each, g.num_requests);
  const int end = min_of(begin + each, g.num_requests);
  int64_t cost = 0;
  int cuts = 0;
  for (int b = begin; b < end; ++b) {
    tiles[b] = num_tiles(g, cache_seqlens[b]);
    cost += g.works_per_request * work_cost(g, tiles[b]);
    cuts += num_fixed_splits(g, tiles[b]);
  }
  const BlockSum<int64_t> costs = block_exclusive_sum<kThreads>(cost);
  const BlockSum<int> all_cuts = g.fixed_split_tiles > 0 ? block_exclusive_sum<kThreads>(cuts) : BlockSum<int>{0, 0};

  int64_t cost_before = costs.before;
  int cuts_before = all_cuts.before;
  for (int b = begin; b < end; ++b) {
    prefix[b] = cost_before;
    num_splits[b] = cuts_before;
    cost_before += g.works_per_request * work_cost(g, tiles[b]);
    cuts_before += num_fixed_splits(g, tiles[b]);
  }
  if (threadIdx.x == 0) {
    prefix[g.num_requests] = costs.total;
    num_splits[g.num_requests] = all_cuts.total;
  }
  __syncthreads();
  const SplitKvBatch batch{prefix, tiles};
  for (int part = threadIdx.x; part < g.num_sm_parts; part += kThreads) entries[part] = split_kv_entry(g, batch, part);
}

template <int kThreads>
void launch_split_kv_plan_as(const SplitKvGeometry& g, const int32_t* cache_seqlens, SplitKvEntry* entries,
                             int32_t* num_splits, cudaStream_t stream) {
  const size_t bytes = (g.num_requests + 1) * sizeof(int64_t) + g.num_requests * sizeof(int32_t);
  constexpr size_t kAlwaysThere = 48 * 1024 - 1024;  // less what the scan takes
  if (bytes > kAlwaysThere) {
    check_cuda(cudaFuncSetAttribute(&split_kv_plan_kernel<kThreads>, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                    static_cast<int>(bytes)),
               "shared memory for the plan of so large a batch");
  }
  split_kv_plan_kernel<kThreads><<<1, kThreads, bytes, stream>>>(g, cache_seqlens, entries, num_splits);
  check_cuda(cudaGetLastError(), "split_kv_plan_kernel");
}

// `op` names the caller in errors. tile_scheduler_metadata is int32 [num_sm_parts, 8], num_splits int32 [B + 1].
inline void launch_split_kv_plan(const char* op, const SplitKvGeometry& g, const int32_t* cache_seqlens,
                                 int32_t* tile_scheduler_metadata, int32_t* num_splits, cudaStream_t stream) {
  constexpr int kMaxRequests = 8000;  // 96 KB of shared memory, which every architecture since sm_80 has
  if (g.num_requests > kMaxRequests) {
    throw std::runtime_error(std::string("attnops::") + op + ": cache_seqlens.shape[0] (batch_size) must be at most " +
                             std::to_string(kMaxRequests) + ", got " + std::to_string(g.num_requests));
  }
  SplitKvEntry* const entries = reinterpret_cast<SplitKvEntry*>(tile_scheduler_metadata);
  const int busy = max_of(g.num_requests, g.num_sm_parts);
  if (busy <= 192) return launch_split_kv_plan_as<192>(g, cache_seqlens, entries, num_splits, stream);
  if (busy <= 512) return launch_split_kv_plan_as<512>(g, cache_seqlens, entries, num_splits, stream);
  launch_split_kv_plan_as<1024>(g, cache_seqlens, entries, num_splits, stream);
}

}  // namespace attnops
