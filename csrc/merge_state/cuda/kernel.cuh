#pragma once
#include "core/softmax_state.h"
#include "device/common/vec.h"
#include "merge_state/params.h"

namespace attnops::merge_state {

template <typename T>
__device__ const T* row_of(const Params::Side& side, int64_t token, int head) {
  return static_cast<const T*>(side.out) + token * side.out_stride_token + head * side.out_stride_head;
}

// A group of kLanes neighbouring lanes merges one row, each lane every kLanes-th vector. All lanes read the row's two
// lse before the group's barrier and one of them writes the merged lse after it, so lse may be a side's own array;
// every vector is read by the lane that writes it, so out may be a side's own, too.
template <typename T, typename V, int kThreads>
__global__ void __launch_bounds__(kThreads) merge_state_kernel(const __grid_constant__ Params p, int lanes) {
  const int vecs_per_head = p.head_dim / V::kSize;
  const int64_t row = (static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x) / lanes;
  const int lane = threadIdx.x % lanes;
  const bool active = row < p.num_tokens * p.num_heads;
  const int64_t token = row / p.num_heads;
  const int head = static_cast<int>(row % p.num_heads);

  const MergeWeights w = active ? merge_weights(p.a.lse[row], p.b.lse[row]) : MergeWeights{};
  __syncwarp();  // `lanes` divides 32: a row never leaves its warp
  if (!active) return;
  if (lane == 0) p.lse[row] = w.lse;
  for (int d = lane * V::kSize; d < vecs_per_head * V::kSize; d += lanes * V::kSize) {
    const V a = load_vec<V>(row_of<T>(p.a, token, head) + d);
    const V b = load_vec<V>(row_of<T>(p.b, token, head) + d);
    V merged;
#pragma unroll
    for (int i = 0; i < V::kSize; ++i) {
      merged.data[i] = static_cast<T>(merge_value(w, static_cast<float>(a.data[i]), static_cast<float>(b.data[i])));
    }
    store_vec(static_cast<T*>(p.out) + token * p.out_stride_token + head * p.out_stride_head + d, merged);
  }
}

// n states: a thread owns one vector of one row, and walks the states twice: maximum and sum, then the weighted rows.
template <typename T, typename V, int kThreads>
__global__ void __launch_bounds__(kThreads) merge_states_kernel(const __grid_constant__ ManyParams p) {
  const int vecs_per_head = p.head_dim / V::kSize;
  const int64_t rows = p.num_tokens * p.num_heads;
  const int64_t item = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
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
