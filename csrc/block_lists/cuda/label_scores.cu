#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "block_lists/cuda/launch.h"
#include "device/common/launch_dependent.cuh"
#include "device/common/pdl.cuh"
#include "device/common/vec.h"

namespace attnops::block_lists {
namespace {

constexpr int kThreads = 128;
constexpr int kHeadsAtOnce = 8;  // query heads whose sums a thread holds
constexpr int64_t kMostBlocks = 132 * 32;
constexpr int kMostChannels = 64;  // of their queries that are in shared memory at once

__device__ float as_float(float x) { return x; }
__device__ float as_float(__half x) { return __half2float(x); }
__device__ float as_float(__nv_bfloat16 x) { return __bfloat162float(x); }

// A thread has a key: it reads its label in vectors of kPer elements, once for each 8 query heads. Queries are read
// from shared memory by all threads at once. Memory of the labels bounds it: 64 bytes a key for 8 heads x 32 channels.
// The largest product of one label with the queries of its group; all threads of a CTA come here together.
template <typename T, int kPer>
__device__ float best_product(const ScoreParams& p, const T* q, const T* label,
                              float (&queries)[kHeadsAtOnce][kMostChannels]) {
  float best = -INFINITY;
  const int group = p.group();
  for (int g = 0; g < group; g += kHeadsAtOnce) {
    const int count = min_of(group - g, kHeadsAtOnce);
    float sums[kHeadsAtOnce] = {};
    for (int base = 0; base < p.num_channels; base += kMostChannels) {
      const int channels = min_of(p.num_channels - base, kMostChannels);
      __syncthreads();
      for (int i = threadIdx.x; i < count * channels; i += kThreads) {
        const int h = i / channels, c = i - h * channels;
        queries[h][c] = as_float(q[(g + h) * p.q_stride_head + base + c]);
      }
      __syncthreads();
      if (label == nullptr) continue;
      for (int c = 0; c < channels; c += kPer) {
        const auto values = load_vec<Vec<T, kPer>>(label + base + c);
#pragma unroll
        for (int h = 0; h < kHeadsAtOnce; ++h) {
          if (h >= count) break;
#pragma unroll
          for (int i = 0; i < kPer; ++i) sums[h] += queries[h][c + i] * as_float(values.data[i]);
        }
      }
    }
#pragma unroll
    for (int h = 0; h < kHeadsAtOnce; ++h) {
      if (h < count) best = fmaxf(best, sums[h]);
    }
  }
  return label == nullptr ? -INFINITY : best;
}

// A thread has a key: it reads its label in vectors of kPer elements, once for each 8 query heads. Queries are read
// from shared memory by all threads at once. CTAs take turns, so that a wide page table costs nothing.
template <typename T, int kPer>
__global__ void __launch_bounds__(kThreads) score_kernel(const __grid_constant__ ScoreParams p) {
  __shared__ float queries[kHeadsAtOnce][kMostChannels];
  wait_for_earlier_kernels();
  let_next_kernel_start();
  const int request = blockIdx.z, head = blockIdx.y;
  const int64_t keys = scored_keys(p, request), step = static_cast<int64_t>(gridDim.x) * kThreads;
  if (p.report != nullptr && blockIdx.x == 0 && head == 0 && threadIdx.x == 0) report_columns(p, request);
  const T* const q = static_cast<const T*>(p.q) + request * p.q_stride_request + head * p.group() * p.q_stride_head;
  float* const row = p.scores + request * p.score_stride_request + head * p.score_stride_head;
  for (int64_t first = static_cast<int64_t>(blockIdx.x) * kThreads; first < keys; first += step) {
    const int64_t key = first + threadIdx.x;
    const int64_t place = key < keys ? label_place(p, request, head, static_cast<int>(key)) : -1;
    const T* const label = place < 0 ? nullptr : static_cast<const T*>(p.labels) + place;
    const float best = best_product<T, kPer>(p, q, label, queries);
    if (key < keys) row[key] = best;
  }
}

template <typename T>
void launch_of(const ScoreParams& p, CUstream_st* stream) {
  constexpr int kPer = 16 / sizeof(T);
  const bool vectors = p.num_channels % kPer == 0 && rows_aligned(p.labels, sizeof(T), 16, p.label_stride_page,
                                                                  p.label_stride_token, p.label_stride_head);
  const int64_t tiles = ceil_div<int64_t>(p.columns, kThreads), rows = int64_t{p.num_requests} * p.num_kv_heads;
  const LaunchShape shape{.blocks = static_cast<int>(min_of(tiles, max_of(kMostBlocks / rows, int64_t{1}))),
                          .threads = kThreads,
                          .shared_bytes = 0,
                          .max_shared_bytes = 0,
                          .blocks_y = p.num_kv_heads,
                          .blocks_z = p.num_requests};
  if (vectors) {
    launch_dependent<&score_kernel<T, kPer>>("label_scores", shape, stream, p);
  } else {
    launch_dependent<&score_kernel<T, 1>>("label_scores", shape, stream, p);
  }
}

}  // namespace

void launch(const ScoreParams& p, CUstream_st* stream) {
  if (p.num_requests == 0 || p.columns == 0) return;
  if (p.dtype == DType::kFloat32) return launch_of<float>(p, stream);
  if (p.dtype == DType::kFloat16) return launch_of<__half>(p, stream);
  launch_of<__nv_bfloat16>(p, stream);
}

}  // namespace attnops::block_lists
