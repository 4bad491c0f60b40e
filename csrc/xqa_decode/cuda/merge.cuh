#pragma once
#include <cmath>

#include "device/common/vec.h"
#include "xqa_decode/cuda/pieces.cuh"

namespace attnops::xqa_decode {

// A work's place among the outputs.
struct WorkPlace {
  int work, request, kv_head;
};

// Four neighbouring values of a finished row, divided by its sum: v_scale and sink applied, rounded, stored.
// `lse` is the natural log.
__device__ inline void store_output(const Params& p, const Shape& shape, const WorkPlace& place, int row, int d,
                                    float4 values, float lse) {
  const int token = shape.by_group.divide(row);
  const int head = place.kv_head * shape.group + row - token * shape.group;
  if (d == 0 && p.lse) {
    p.lse[(static_cast<int64_t>(place.request) * p.seqlen_q + token) * p.num_q_heads + head] = lse;
  }
  float factor = p.v_scale ? __ldg(p.v_scale + place.kv_head * p.v_scale_stride) : 1.f;
  if (p.sinks && lse != -INFINITY) factor /= 1.f + expf(__ldg(p.sinks + head) - lse);
  const float scaled[4] = {values.x * factor, values.y * factor, values.z * factor, values.w * factor};
  const int64_t at = place.request * p.out_stride_request + token * p.out_stride_token + head * p.out_stride_head + d;
  const auto store = [&](auto* out) {
    using Out = std::remove_pointer_t<decltype(out)>;
    Vec<Out, 4> rounded;
#pragma unroll
    for (int i = 0; i < 4; ++i) rounded.data[i] = static_cast<Out>(scaled[i]);
    if (shape.vector_out) return store_vec(out + at, rounded);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if (d + i < p.head_dim) out[at + i] = rounded.data[i];
    }
  };
  if (p.dtype == DType::kBFloat16) {
    store(static_cast<__nv_bfloat16*>(p.out));
  } else {
    store(static_cast<__half*>(p.out));
  }
}

__device__ inline void store_partial(const Params& p, const Shape& shape, int64_t slot, int row, int d, float4 values,
                                     float lse) {
  const int64_t at = slot * shape.rows + row;
  if (d == 0) p.lse_partial[at] = lse;
  float* out = p.out_partial + at * p.head_dim + d;
  if (shape.wide_partials) {
    *reinterpret_cast<float4*>(out) = values;
    return;
  }
  const float all[4] = {values.x, values.y, values.z, values.w};
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    if (d + i < p.head_dim) out[i] = all[i];
  }
}

// Past L1: another SM wrote it, and a line of L1 may be older.
__device__ inline float4 load_partial(const Params& p, const Shape& shape, int64_t slot, int row, int d) {
  const float* in = p.out_partial + (slot * shape.rows + row) * p.head_dim + d;
  if (shape.wide_partials) return __ldcg(reinterpret_cast<const float4*>(in));
  float all[4] = {};
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    if (d + i < p.head_dim) all[i] = __ldcg(in + i);
  }
  return make_float4(all[0], all[1], all[2], all[3]);
}

// A partial softmax result of a thread: four values, weighted but not divided by `sum`.
struct PartialSum {
  float lse_max = -INFINITY, sum = 0.f;
  float4 values = {0.f, 0.f, 0.f, 0.f};

  __device__ void rescale(float lse_new) {
    const float factor = lse_max == -INFINITY ? 0.f : __expf(lse_max - lse_new);
    lse_max = lse_new;
    sum *= factor;
    values.x *= factor, values.y *= factor, values.z *= factor, values.w *= factor;
  }

  __device__ void add(float weight, float4 v) {
    if (weight == 0.f) return;  // an empty split's row may hold anything; a NaN weight goes on: it must show
    values.x += weight * v.x, values.y += weight * v.y, values.z += weight * v.z, values.w += weight * v.w;
  }
};

// The merge of a work with many splits is cut into units that several CTAs take. An item is four values of a row.
struct MergeShape {
  int items;  // of the work
  int width;  // items that a CTA merges at a time; its threads / width split the splits among themselves
  int steps;  // of `width` items in a unit
  int units;

  __device__ MergeShape(const Params& p, const Shape& shape, int splits, int threads) {
    items = shape.rows * ceil_div(p.head_dim, 4);
    width = splits <= 16 ? threads : splits <= 64 ? threads / 4 : threads / 16;
    const int all_steps = ceil_div(items, width);
    steps = ceil_div(all_steps, splits);  // as many units as there are CTAs that come to take one
    units = ceil_div(all_steps, steps);
  }
};

template <int kThreads>
__device__ inline void merge_unit(const Params& p, const Shape& shape, const WorkPlace& place, const Splits& splits,
                                  const MergeShape& merge, int unit, float* scratch) {
  constexpr int kBatch = 8;  // splits that a thread loads at a time
  const int item_lane = threadIdx.x % merge.width, split_lane = threadIdx.x / merge.width;
  const int split_lanes = kThreads / merge.width;
  const int vecs = ceil_div(p.head_dim, 4);
  for (int step = 0; step < merge.steps; ++step) {
    const int item = (unit * merge.steps + step) * merge.width + item_lane;
    const bool live = item < merge.items;
    const int row = item / vecs, d = (item - row * vecs) * 4;
    const int safe_row = live ? row : 0;
    PartialSum state;
    for (int first = split_lane; first < splits.count; first += split_lanes * kBatch) {
      // All loads of a batch before the first use: a split beyond the last is the last once more, and counts nothing.
      float lse[kBatch];
      float4 values[kBatch];
#pragma unroll
      for (int b = 0; b < kBatch; ++b) {
        const int64_t slot = splits.slot(min_of(first + b * split_lanes, splits.count - 1));
        lse[b] = __ldcg(p.lse_partial + slot * shape.rows + safe_row);
        values[b] = load_partial(p, shape, slot, safe_row, d);
      }
      float top = state.lse_max;
#pragma unroll
      for (int b = 0; b < kBatch; ++b) {
        if (first + b * split_lanes >= splits.count) lse[b] = -INFINITY;
        top = fmaxf(top, lse[b]);
      }
      if (top != state.lse_max) state.rescale(top);
#pragma unroll
      for (int b = 0; b < kBatch; ++b) {
        const float weight = lse[b] == -INFINITY ? 0.f : __expf(lse[b] - top);
        state.sum += weight;
        state.add(weight, values[b]);
      }
    }
    if (split_lanes > 1) {
      // [split_lane][item_lane]: (lse_max, sum) and values, in two arrays.
      auto* heads = reinterpret_cast<float2*>(scratch);
      auto* bodies = reinterpret_cast<float4*>(scratch + 2 * kThreads);
      __syncthreads();
      heads[threadIdx.x] = make_float2(state.lse_max, state.sum);
      bodies[threadIdx.x] = state.values;
      __syncthreads();
      if (split_lane > 0) continue;
      float top = state.lse_max;
      for (int i = 1; i < split_lanes; ++i) top = fmaxf(top, heads[i * merge.width + item_lane].x);
      state.rescale(top);
      for (int i = 1; i < split_lanes; ++i) {
        const float2 head = heads[i * merge.width + item_lane];
        const float weight = head.x == -INFINITY ? 0.f : __expf(head.x - top);
        state.sum += weight * head.y;
        state.add(weight, bodies[i * merge.width + item_lane]);
      }
    }
    if (!live) continue;
    const bool empty = state.sum == 0.f;
    const float inverse = empty ? 0.f : 1.f / state.sum;
    const float4 v = state.values;
    store_output(p, shape, place, row, d, make_float4(v.x * inverse, v.y * inverse, v.z * inverse, v.w * inverse),
                 empty ? -INFINITY : state.lse_max + __logf(state.sum));
  }
}

// How the splits of a work find each other: the work's semaphore counts the splits that have arrived in its low half
// and the units of the merge that have been taken in its high half, and is zero before and after.
//
// The last to arrive sees to it that all units are merged. Splits that have nothing else to do wait a while for it, to
// take units off it; they never wait for long, so nothing hangs when a part runs late or has not even started, and
// whoever merges a unit, its sums are formed in the order of the splits: the bits do not depend on it.
inline constexpr int kArrived = 0xffff;
inline constexpr int kTaken = 0x10000;
inline constexpr long long kPatienceNanoseconds = 10000;

__device__ inline long long now_nanoseconds() {
  long long time;
  asm volatile("mov.u64 %0, %globaltimer;\n" : "=l"(time));
  return time;
}

__device__ inline int load_semaphore(const int32_t* semaphore) {
  int value;
  asm volatile("ld.acquire.gpu.global.s32 %0, [%1];\n" : "=r"(value) : "l"(semaphore) : "memory");
  return value;
}

// Whether all splits arrive while there are units to take.
__device__ inline bool wait_for_splits(const int32_t* semaphore, int splits) {
  const long long give_up = now_nanoseconds() + kPatienceNanoseconds;
  do {
    const int seen = load_semaphore(semaphore);
    if (seen == 0) return false;
    if ((seen & kArrived) == splits) return true;
  } while (now_nanoseconds() < give_up);
  return false;
}

// Takes a unit of the merge: its number, or -1 when none is left.
__device__ inline int take_unit(int32_t* semaphore, int units) {
  int seen = load_semaphore(semaphore);
  while (seen != 0) {
    const int unit = seen / kTaken;
    const int before = seen;
    seen = atomicCAS(semaphore, before, unit + 1 == units ? 0 : before + kTaken);
    if (seen == before) return unit;
  }
  return -1;
}

// Called by all threads once the CTA's partial result of a work is written. `flag` and `scratch` lie in shared memory.
template <int kThreads>
__device__ __noinline__ void arrive_and_merge(const Params& p, const Shape& shape, const WorkPlace& place,
                                              const Splits& splits, bool may_wait, int* flag, float* scratch) {
  int32_t* semaphore = p.semaphores + place.work;
  const MergeShape merge(p, shape, splits.count, kThreads);
  __syncthreads();  // the partial result is written
  bool last = false;
  if (threadIdx.x == 0) {
    __threadfence();
    last = (atomicAdd(semaphore, 1) & kArrived) + 1 == splits.count;
    int unit = -1;
    if (last && merge.units == 1) {
      *semaphore = 0;
      unit = 0;
    } else if (merge.units > 1 && (last || (may_wait && wait_for_splits(semaphore, splits.count)))) {
      unit = take_unit(semaphore, merge.units);
    }
    __threadfence();
    *flag = unit;
  }
  __syncthreads();
  for (int unit = *flag; unit >= 0; unit = *flag) {
    merge_unit<kThreads>(p, shape, place, splits, merge, unit, scratch);
    __syncthreads();
    if (threadIdx.x == 0) *flag = last && merge.units > 1 ? take_unit(semaphore, merge.units) : -1;
    __syncthreads();
  }
}

}  // namespace attnops::xqa_decode
