#pragma once
#include "core/softmax_state.h"
#include "device/common/pdl.cuh"
#include "device/common/row_vec.cuh"
#include "device/common/vec.h"
#include "merge_state/params.h"

namespace attnops::merge_state {

struct RowPlace {
  int64_t token;
  int head;
};

__device__ __forceinline__ RowPlace place_of(int64_t row, int num_heads) {
  if (row <= UINT32_MAX) {  // division of 64 bits is slow
    const auto low = static_cast<uint32_t>(row), token = low / static_cast<uint32_t>(num_heads);
    return {token, static_cast<int>(low - token * num_heads)};
  }
  return {row / num_heads, static_cast<int>(row % num_heads)};
}

template <typename T>
__device__ const T* row_of(const Params::Side& side, const RowPlace& place) {
  return static_cast<const T*>(side.out) + place.token * side.out_stride_token + place.head * side.out_stride_head;
}

// A group of 2^log_lanes neighbouring lanes merges one row, each lane every so many vectors. All lanes read the row's
// two lse before the group's barrier and one of them writes the merged lse after it, so lse may be a side's own array;
// every vector is read by the lane that writes it, so out may be a side's own, too. The first vectors are asked for
// together with the lse.
template <typename T, typename V, int kThreads>
__global__ void __launch_bounds__(kThreads) merge_state_kernel(const __grid_constant__ Params p, int log_lanes) {
  const int64_t row = (static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x) >> log_lanes;
  const int lane = threadIdx.x & ((1 << log_lanes) - 1);
  const bool active = row < p.num_tokens * p.num_heads;
  const RowPlace place = place_of(row, p.num_heads);
  const T *side_a = row_of<T>(p.a, place), *side_b = row_of<T>(p.b, place);
  T* out = static_cast<T*>(p.out) + place.token * p.out_stride_token + place.head * p.out_stride_head;
  wait_for_earlier_kernels();
  let_next_kernel_start();

  using In = RowVec<T, V::kSize>;
  int d = lane * V::kSize;
  In a, b;
  MergeWeights w{};
  if (active) {
    if (d < p.head_dim) a = load_vec<In>(side_a + d), b = load_vec<In>(side_b + d);
    w = merge_weights(p.a.lse[row], p.b.lse[row]);
  }
  __syncwarp();  // 2^log_lanes divides 32: a row never leaves its warp
  if (!active) return;
  if (lane == 0) p.lse[row] = w.lse;
  while (d < p.head_dim) {
    V merged;
#pragma unroll
    for (int i = 0; i < V::kSize; ++i) {
      merged.data[i] = static_cast<T>(merge_value(w, a.at(i), b.at(i)));
    }
    store_vec(out + d, merged);
    d += V::kSize << log_lanes;
    if (d < p.head_dim) a = load_vec<In>(side_a + d), b = load_vec<In>(side_b + d);
  }
}

// n states: a thread owns one vector of one row, and walks the states twice: maximum and sum, then the weighted rows.
template <typename T, typename V, int kThreads>
__global__ void __launch_bounds__(kThreads) merge_states_kernel(const __grid_constant__ ManyParams p) {
  const int vecs_per_head = p.head_dim / V::kSize;
  const int64_t rows = p.num_tokens * p.num_heads;
  const int64_t item = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  wait_for_earlier_kernels();
  let_next_kernel_start();
  if (item >= rows * vecs_per_head) return;
  const int64_t row = item / vecs_per_head;
  const int d = static_cast<int>(item % vecs_per_head) * V::kSize;
  const int64_t token = row / p.num_heads;
  const int head = static_cast<int>(row % p.num_heads);

  float lse_max = -INFINITY;
  for (int s = 0; s < p.num_states; ++s) lse_max = fmaxf(lse_max, p.lses[s * rows + row]);
  float sum = 0.f;
  float total[V::kSize] = {};
  if (lse_max > -INFINITY) {
    const T* state = static_cast<const T*>(p.outs) + token * p.outs_stride_token + head * p.outs_stride_head + d;
    for (int s = 0; s < p.num_states; ++s, state += p.outs_stride_state) {
      const float weight = expf(p.lses[s * rows + row] - lse_max);
      if (weight == 0.f) continue;  // an empty state's row may hold anything
      sum += weight;
      const V values = load_vec<V>(state);
#pragma unroll
      for (int i = 0; i < V::kSize; ++i) total[i] += weight * static_cast<float>(values.data[i]);
    }
  }
  V merged;
#pragma unroll
  for (int i = 0; i < V::kSize; ++i) merged.data[i] = static_cast<T>(sum > 0.f ? total[i] / sum : 0.f);
  store_vec(static_cast<T*>(p.out) + token * p.out_stride_token + head * p.out_stride_head + d, merged);
  if (d == 0) p.lse[row] = sum > 0.f ? lse_max + logf(sum) : -INFINITY;
}

}  // namespace attnops::merge_state
