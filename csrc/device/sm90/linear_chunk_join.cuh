#pragma once
#include "device/common/launch_dependent.cuh"
#include "device/common/pdl.cuh"
#include "device/common/vec.h"
#include "device/sm90/linear_chunk_cuts.h"

// From the ends of segments that began at 0 to those of the request, one after another: E = E_before M + E, in float32.
// Rows of a state know nothing of one another.
namespace attnops::sm90 {

inline constexpr int kJoinThreads = 256, kJoinRows = 8;

// One request's segments, and how many ends of them are to be joined: the last one's is not needed, the first is right.
struct JoinedSegments {
  int64_t place;
  int count;

  __device__ JoinedSegments(const LinearPrefill& p, const ChunkCuts& cuts, int request) {
    const RequestSegments segments(RequestChunks(p, request), request, cuts.most);
    place = segments.place, count = p.in_pool(p.step.state_indices[request]) ? static_cast<int>(segments.count) - 1 : 0;
  }
};

// Grid: blocks of kJoinRows rows x heads x requests. A thread has two columns and a part of the rows of each map.
template <int kKeys>
__global__ void __launch_bounds__(kJoinThreads, 1)
    chunk_join_kernel(const __grid_constant__ LinearPrefill p, const __grid_constant__ ChunkCuts cuts, int row_blocks) {
  constexpr int kPairs = kKeys / 2, kParts = kJoinThreads / kPairs, kOwn = kKeys / kParts;
  constexpr int kOutputs = kJoinRows * kPairs / kJoinThreads;  // pairs of a row's columns, a thread
  __shared__ float state[kJoinRows][kKeys];
  __shared__ float2 sums[kParts][kJoinRows][kPairs];
  wait_for_earlier_kernels();
  let_next_kernel_start();
  const LinearStep& step = p.step;
  const int row = blockIdx.x % row_blocks * kJoinRows, head = blockIdx.x / row_blocks % step.num_heads;
  const JoinedSegments joined(p, cuts, blockIdx.x / row_blocks / step.num_heads);
  if (joined.count < 2) return;
  const int pair = threadIdx.x % kPairs, part = threadIdx.x / kPairs;
  const auto end_of = [&](int segment, int output) {
    const int at = output * kJoinThreads + threadIdx.x;
    const int64_t place = (joined.place + segment) * step.num_heads + head;
    return reinterpret_cast<float2*>(cuts.ends + (place * step.value_dim + row + at / kPairs) * kKeys) + at % kPairs;
  };
  float2 map[kOwn], next[kOwn], end[kOutputs];
  const auto load_map = [&](int segment) {
    const int64_t place = (joined.place + segment) * step.num_heads + head;
    const float2* from = reinterpret_cast<const float2*>(cuts.maps + (place * kKeys + part * kOwn) * kKeys) + pair;
#pragma unroll
    for (int i = 0; i < kOwn; ++i) next[i] = from[i * kPairs];
  };
  load_map(1);
#pragma unroll
  for (int i = 0; i < kOutputs; ++i) {
    const int at = i * kJoinThreads + threadIdx.x;
    *reinterpret_cast<float2*>(&state[at / kPairs][at % kPairs * 2]) = *end_of(0, i);
  }
  for (int segment = 1; segment < joined.count; ++segment) {
#pragma unroll
    for (int i = 0; i < kOwn; ++i) map[i] = next[i];
#pragma unroll
    for (int i = 0; i < kOutputs; ++i) end[i] = *end_of(segment, i);
    if (segment + 1 < joined.count) load_map(segment + 1);
    __syncthreads();
#pragma unroll
    for (int r = 0; r < kJoinRows; ++r) {
      float2 sum = make_float2(0.f, 0.f);
#pragma unroll
      for (int i = 0; i < kOwn; i += 4) {
        const float4 x = *reinterpret_cast<const float4*>(&state[r][part * kOwn + i]);
        const float of_row[4] = {x.x, x.y, x.z, x.w};
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          sum.x = fmaf(of_row[j], map[i + j].x, sum.x);
          sum.y = fmaf(of_row[j], map[i + j].y, sum.y);
        }
      }
      sums[part][r][pair] = sum;
    }
    __syncthreads();
#pragma unroll
    for (int i = 0; i < kOutputs; ++i) {
      const int at = i * kJoinThreads + threadIdx.x, r = at / kPairs, column = at % kPairs;
#pragma unroll
      for (int j = 0; j < kParts; ++j) end[i].x += sums[j][r][column].x, end[i].y += sums[j][r][column].y;
      *reinterpret_cast<float2*>(&state[r][2 * column]) = end[i];
      *end_of(segment, i) = end[i];
    }
  }
}

// The same with one decay for a state: M is a number, the product of the chunks' decays. A thread has four elements.
template <int kKeys>
__global__ void __launch_bounds__(kJoinThreads, 1)
    chunk_join_decays_kernel(const __grid_constant__ LinearPrefill p, const __grid_constant__ ChunkCuts cuts,
                             int blocks) {
  constexpr ChunkScratch kLayout{.panels = kKeys / 64, .delta = false, .channels = false};
  __shared__ float decays[kMostSegmentHeads];
  wait_for_earlier_kernels();
  let_next_kernel_start();
  const LinearStep& step = p.step;
  const int head = blockIdx.x / blocks % step.num_heads, request = blockIdx.x / blocks / step.num_heads;
  const JoinedSegments joined(p, cuts, request);
  if (joined.count < 2) return;
  const RequestChunks chunks(p, request);
  const RequestSegments segments(chunks, request, cuts.most);
  for (int segment = 1 + threadIdx.x / 32; segment < joined.count; segment += kJoinThreads / 32) {
    float decay = 1.f;
    for (int64_t c = segments.first_chunk(segment) + threadIdx.x % 32; c < segments.first_chunk(segment + 1); c += 32) {
      const unsigned char* chunk =
          static_cast<const unsigned char*>(p.scratch) + ((chunks.place + c) * step.num_heads + head) * kLayout.bytes();
      decay *= reinterpret_cast<const float*>(chunk + kLayout.factors_at())[3 * kChunk];
    }
#pragma unroll
    for (int distance = 16; distance > 0; distance /= 2) decay *= __shfl_xor_sync(0xffffffffu, decay, distance);
    if (threadIdx.x % 32 == 0) decays[segment] = decay;
  }
  __syncthreads();
  const int at = (blockIdx.x % blocks * kJoinThreads + threadIdx.x) * 4, elements = step.value_dim * kKeys;
  if (at >= elements) return;
  float* own = cuts.ends + (joined.place * step.num_heads + head) * elements + at;
  const int64_t stride = int64_t{step.num_heads} * elements;
  float4 state = *reinterpret_cast<const float4*>(own);
#pragma unroll 4
  for (int segment = 1; segment < joined.count; ++segment) {
    float4 end = *reinterpret_cast<const float4*>(own + segment * stride);
    const float decay = decays[segment];
    end.x = fmaf(decay, state.x, end.x), end.y = fmaf(decay, state.y, end.y);
    end.z = fmaf(decay, state.z, end.z), end.w = fmaf(decay, state.w, end.w);
    *reinterpret_cast<float4*>(own + segment * stride) = state = end;
  }
}

template <int kKeys, bool kDelta>
int join_blocks(const LinearPrefill& p) {
  return kDelta ? ceil_div(p.step.value_dim, kJoinRows) : ceil_div(p.step.value_dim * kKeys, 4 * kJoinThreads);
}

template <int kKeys, bool kDelta>
void launch_chunk_join(const char* what, const LinearPrefill& p, const ChunkCuts& cuts, cudaStream_t stream) {
  const int blocks = join_blocks<kKeys, kDelta>(p);
  const LaunchShape shape{.blocks = p.step.batch_size * p.step.num_heads * blocks,
                          .threads = kJoinThreads,
                          .shared_bytes = 0,
                          .max_shared_bytes = 0};
  if constexpr (kDelta) {
    launch_dependent<&chunk_join_kernel<kKeys>>(what, shape, stream, p, cuts, blocks);
  } else {
    launch_dependent<&chunk_join_decays_kernel<kKeys>>(what, shape, stream, p, cuts, blocks);
  }
}

}  // namespace attnops::sm90
