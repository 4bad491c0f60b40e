#pragma once
#include "core/math.h"
#include "device/common/launch_dependent.cuh"
#include "device/common/pdl.cuh"
#include "fp4_kv/params.h"

namespace attnops::fp4_kv {

// Merges the shares: a warp for 128 dims of a row, or for all 64.
template <typename T, int kDim>
__global__ void __launch_bounds__(128) fp4_merge_kernel(const __grid_constant__ DecodeParams p) {
  constexpr int kOwn = min_of(kDim / 32, 4), kSlices = kDim / (32 * kOwn);  // dims of a lane
  constexpr int kAtOnce = 4;  // shares whose loads do not wait for one another
  struct alignas(4 * kOwn) Floats {
    float x[kOwn];
  };
  struct alignas(2 * kOwn) Values {
    T x[kOwn];
  };
  wait_for_earlier_kernels();
  const int lane = threadIdx.x % 32;
  const int64_t rows = int64_t{p.batch_size} * p.seqlen_q * p.num_q_heads;
  const int64_t work = static_cast<int64_t>(blockIdx.x) * 4 + threadIdx.x / 32, row = work / kSlices;
  const int slice = static_cast<int>(work % kSlices);
  if (row >= rows) return;
  float top = -INFINITY;
  for (int split = lane; split < p.num_splits; split += 32) top = fmaxf(top, p.lse_partial[split * rows + row]);
#pragma unroll
  for (int lanes = 1; lanes < 32; lanes *= 2) top = fmaxf(top, __shfl_xor_sync(~0u, top, lanes));
  const bool empty = top == -INFINITY;
  float sum = 0.f, acc[kOwn] = {};
  const int dim = 32 * kOwn * slice + kOwn * lane;
  for (int first = 0; first < p.num_splits && !empty; first += 32) {
    const int count = min_of(p.num_splits - first, 32);
    const float own = lane < count ? exp2f(p.lse_partial[(first + lane) * rows + row] - top) : 0.f;
    for (int i = 0; i < count; i += kAtOnce) {
      float weights[kAtOnce];
      Floats from[kAtOnce];
#pragma unroll
      for (int j = 0; j < kAtOnce; ++j) {
        weights[j] = __shfl_sync(~0u, own, i + j);
        from[j] = {};
        if (weights[j] == 0.f) continue;
        from[j] = *reinterpret_cast<const Floats*>(p.out_partial + ((first + i + j) * rows + row) * kDim + dim);
      }
#pragma unroll
      for (int j = 0; j < kAtOnce; ++j) {
        sum += weights[j];
#pragma unroll
        for (int d = 0; d < kOwn; ++d) acc[d] += weights[j] * from[j].x[d];
      }
    }
  }
  const int head = static_cast<int>(row % p.num_q_heads);
  const int64_t token = row / p.num_q_heads;
  const float lse = empty ? -INFINITY : (top + log2f(sum)) * kLn2;
  if (p.lse && lane == 0 && slice == 0) p.lse[row] = lse;
  float factor = empty ? 0.f : 1.f / sum;
  if (p.sinks && !empty) factor /= 1.f + expf(p.sinks[head] - lse);
  T* out = static_cast<T*>(p.out) + token / p.seqlen_q * p.out_stride_request +
           token % p.seqlen_q * p.out_stride_token + head * p.out_stride_head + dim;
  Values values;
#pragma unroll
  for (int d = 0; d < kOwn; ++d) values.x[d] = T(acc[d] * factor);
  if (reinterpret_cast<uintptr_t>(out) % sizeof(Values) == 0) {
    *reinterpret_cast<Values*>(out) = values;
  } else {
#pragma unroll
    for (int d = 0; d < kOwn; ++d) out[d] = values.x[d];
  }
}

template <typename T, int kDim>
void launch_merge(const DecodeParams& p, cudaStream_t stream) {
  const int64_t rows = int64_t{p.batch_size} * p.seqlen_q * p.num_q_heads;
  if (rows == 0) return;
  const int blocks = static_cast<int>(ceil_div<int64_t>(rows * max_of(kDim / 128, 1), 4));
  launch_dependent<&fp4_merge_kernel<T, kDim>>("fp4_merge_kernel", {blocks, 128, 0, 0}, stream, p);
}

}  // namespace attnops::fp4_kv
