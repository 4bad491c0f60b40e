#pragma once
#include "xqa_decode/cuda/merge.cuh"
#include "xqa_decode/sm90/cluster_wgmma/limits.h"
#include "xqa_decode/sm90/cluster_wgmma/share.cuh"

namespace attnops::xqa_decode::sm90 {

using namespace attnops::sm90;

// An item's weighted values, the maximum that they are relative to (in units of log2) and the sum of their weights.
struct ItemSum {
  float top = -INFINITY, sum = 0.f;
  float4 values = {0.f, 0.f, 0.f, 0.f};

  __device__ void scale(float factor) {
    sum *= factor;
    values.x *= factor, values.y *= factor, values.z *= factor, values.w *= factor;
  }
  __device__ void add(float factor, float other_sum, float4 v) {
    sum += factor * other_sum;
    values.x += factor * v.x, values.y += factor * v.y, values.z += factor * v.z, values.w += factor * v.w;
  }
  __device__ void add_lanes(int step) {
    const float other_top = __shfl_xor_sync(~0u, top, step), other_sum = __shfl_xor_sync(~0u, sum, step);
    const float4 v = {__shfl_xor_sync(~0u, values.x, step), __shfl_xor_sync(~0u, values.y, step),
                      __shfl_xor_sync(~0u, values.z, step), __shfl_xor_sync(~0u, values.w, step)};
    const float next = fmaxf(top, other_top), base = next == -INFINITY ? 0.f : next;
    scale(exp2_approx(top - base));
    add(exp2_approx(other_top - base), other_sum, v);
    top = next;
  }
  __device__ float lse(float shift) const { return sum == 0.f ? -INFINITY : (top - shift + __log2f(sum)) * kLn2; }
  __device__ float4 mean() const {
    const float inverse = sum == 0.f ? 0.f : __fdividef(1.f, sum);
    return make_float4(values.x * inverse, values.y * inverse, values.z * inverse, values.w * inverse);
  }
};

// Sums up `count` terms, four lanes to an item: lane / 8 takes terms lane / 8, + 4, ...; kTerms bounds a lane's.
// `load(i, &sum, &values)` gives term i and returns its maximum.
template <int kTerms, class Load>
__device__ __forceinline__ ItemSum sum_terms(int count, int lane, Load load) {
  float top[kTerms], sum[kTerms];
  float4 values[kTerms];
#pragma unroll
  for (int i = 0; i < kTerms; ++i) {
    const int term = lane / 8 + 4 * i;
    top[i] = -INFINITY, sum[i] = 0.f, values[i] = make_float4(0.f, 0.f, 0.f, 0.f);
    if (term < count) top[i] = load(term, &sum[i], &values[i]);
  }
  ItemSum total;
#pragma unroll
  for (int i = 0; i < kTerms; ++i) total.top = fmaxf(total.top, top[i]);
  const float base = total.top == -INFINITY ? 0.f : total.top;
#pragma unroll
  for (int i = 0; i < kTerms; ++i) total.add(exp2_approx(top[i] - base), sum[i], values[i]);
  total.add_lanes(8);
  total.add_lanes(16);
  return total;
}

// Where an item goes, and what it is multiplied with: all that can be known before it.
struct OutputPlace {
  int64_t at;  // in out, which has 16-bit elements
  float* lse;  // of this thread to write, or null
  float v_scale;
  const float* sink;  // or null

  __device__ __forceinline__ OutputPlace(const Params& p, const Shape& shape, const WorkPlace& place, int row, int d) {
    const int token = shape.by_group.divide(row);
    const int head = place.kv_head * shape.group + row - token * shape.group;
    at = place.request * p.out_stride_request + token * p.out_stride_token + head * p.out_stride_head + d;
    lse = d == 0 && p.lse ? p.lse + (static_cast<int64_t>(place.request) * p.seqlen_q + token) * p.num_q_heads + head
                          : nullptr;
    v_scale = p.v_scale ? __ldg(p.v_scale + place.kv_head * p.v_scale_stride) : 1.f;
    sink = p.sinks ? p.sinks + head : nullptr;
  }

  // `row_lse` is the natural log.
  __device__ __forceinline__ float factor(float row_lse) const {
    if (!sink || row_lse == -INFINITY) return v_scale;
    return __fdividef(v_scale, 1.f + __expf(__ldg(sink) - row_lse));
  }
};

// A unit of one cluster among those of the work's other clusters, in memory, where works have room for `most` of them
// and `units` units. True for the warp that comes last, which then has the sum of all.
template <class Tr>
__device__ __forceinline__ bool meet_clusters(const Params& p, int units, int most, int work, int cluster_index,
                                              int clusters, int unit, int lane, ItemSum& total) {
  const int first = work * most * units + unit;  // of the records of this unit
  auto* values = reinterpret_cast<float4*>(p.out_partial);
  const float shift = Tr::kProbShift;
  if (lane < kUnitItems) {
    values[static_cast<int64_t>(first + cluster_index * units) * kUnitItems + lane] = total.mean();
    if (lane == 0) p.lse_partial[first + cluster_index * units] = total.lse(shift);
  }
  __syncwarp();
  unsigned before = 0;
  int32_t* semaphore = p.semaphores + work * units + unit;
  if (lane == 0) {
    before = add_acq_rel(semaphore, 1);
    if (before + 1 == clusters) *semaphore = 0;
  }
  if (__shfl_sync(~0u, before, 0) + 1 != clusters) return false;
  __syncwarp();  // what lane 0 has acquired is there for all lanes: a shuffle orders no memory
  total = sum_terms<kMaxTeamClusters / 4>(clusters, lane, [&](int i, float* sum, float4* v) {
    const int record = first + i * units;
    const float lse = __ldcg(p.lse_partial + record);
    *v = __ldcg(values + static_cast<int64_t>(record) * kUnitItems + lane % kUnitItems);
    *sum = lse == -INFINITY ? 0.f : 1.f;
    return lse * kLog2e + shift;
  });
  return true;
}

}  // namespace attnops::xqa_decode::sm90
