#pragma once
#include "core/math.h"
#include "device/common/launch_dependent.cuh"
#include "device/common/pdl.cuh"
#include "fp4_kv/params.h"

namespace attnops::fp4_kv {

// Merges the shares: a warp for a row.
template <typename T>
__global__ void __launch_bounds__(128) fp4_merge_kernel(const __grid_constant__ DecodeParams p) {
  wait_for_earlier_kernels();
  let_next_kernel_start();
  const int lane = threadIdx.x % 32;
  const int64_t rows = int64_t{p.batch_size} * p.seqlen_q * p.num_q_heads;
  const int64_t row = static_cast<int64_t>(blockIdx.x) * 4 + threadIdx.x / 32;
  if (row >= rows) return;
  float top = -INFINITY;
  for (int split = lane; split < p.num_splits; split += 32) top = fmaxf(top, p.lse_partial[split * rows + row]);
#pragma unroll
  for (int lanes = 1; lanes < 32; lanes *= 2) top = fmaxf(top, __shfl_xor_sync(~0u, top, lanes));
  const bool empty = top == -INFINITY;
  float sum = 0.f;
  float acc[kMaxHeadDim / 32] = {};
  for (int first = 0; first < p.num_splits && !empty; first += 32) {
    const int count = min_of(p.num_splits - first, 32);
    const float own = lane < count ? exp2f(p.lse_partial[(first + lane) * rows + row] - top) : 0.f;
    sum += own;
#pragma unroll 2
    for (int i = 0; i < count; ++i) {  // nothing of a share decides whether the next one is read
      const float weight = __shfl_sync(~0u, own, i);
      const float* from = p.out_partial + ((first + i) * rows + row) * p.head_dim_v;
#pragma unroll
      for (int d = 0; d < kMaxHeadDim / 32; ++d) {
        if (lane + 32 * d < p.head_dim_v) acc[d] += weight * from[lane + 32 * d];
      }
    }
  }
#pragma unroll
  for (int lanes = 1; lanes < 32; lanes *= 2) sum += __shfl_xor_sync(~0u, sum, lanes);
  const int head = static_cast<int>(row % p.num_q_heads);
  const int64_t token = row / p.num_q_heads;
  const float lse = empty ? -INFINITY : (top + log2f(sum)) * kLn2;
  if (p.lse && lane == 0) p.lse[row] = lse;
  float factor = empty ? 0.f : 1.f / sum;
  if (p.sinks && !empty) factor /= 1.f + expf(p.sinks[head] - lse);
  T* out = static_cast<T*>(p.out) + token / p.seqlen_q * p.out_stride_request +
           token % p.seqlen_q * p.out_stride_token + head * p.out_stride_head;
#pragma unroll
  for (int i = 0; i < kMaxHeadDim / 32; ++i) {
    if (lane + 32 * i < p.head_dim_v) out[lane + 32 * i] = T(acc[i] * factor);
  }
}

template <typename T>
void launch_merge_of(const DecodeParams& p, cudaStream_t stream) {
  const int64_t rows = int64_t{p.batch_size} * p.seqlen_q * p.num_q_heads;
  if (rows == 0) return;
  const int blocks = static_cast<int>(ceil_div<int64_t>(rows, 4));
  launch_dependent<&fp4_merge_kernel<T>>("fp4_merge_kernel", {blocks, 128, 0, 0}, stream, p);
}

}  // namespace attnops::fp4_kv
