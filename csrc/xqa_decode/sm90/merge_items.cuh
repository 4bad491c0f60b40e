#pragma once
#include "xqa_decode/cuda/merge.cuh"
#include "xqa_decode/sm90/request_rows.cuh"

// The merge of partial results by the kernels of this folder: the protocol and the order of its sums are those of
// cuda/merge.cuh. A CTA merges once or twice, so each of its instructions is fetched for that one use, and takes a warp
// some five cycles. So few there are: row numbers of 32 bits, loads under predicates, and as many values of a row in a
// thread as leave room for the loads of all its splits, which share one lse and one weight.
namespace attnops::xqa_decode::sm90 {

// n / d, rounded down, of numbers whose quotient is below 2^22; `inverse` is about 1 / d.
__device__ __forceinline__ int quotient(int n, int d, float inverse) {
  int q = static_cast<int>(static_cast<float>(n) * inverse);
  if (q * d > n) --q;
  if ((q + 1) * d <= n) ++q;
  return q;
}

// How a work's items are divided: over the threads of a CTA, of which some share an item's splits, and over the CTAs
// that come to merge. An item is `vecs` times four values of a row, evenly spaced, so that neighbours read lines.
struct ItemShares {
  int vecs;
  int per_row, items;
  int lanes_shift, width_shift;  // lanes that share an item's splits; items at a time
  int steps;                     // of as many items in a unit
  int units;

  // kLoads: of 16 bytes that a thread has on their way at a time; 1: an item has four values.
  template <int kLoads>
  __device__ __forceinline__ void divide(int rows, int row_vecs, bool wide, int splits, int threads_shift) {
    vecs = 1, per_row = row_vecs, items = rows * row_vecs;
    // Where there are CTAs enough for an item a thread, lanes have fewer splits each.
    int lanes = splits <= 16 ? 0 : splits <= 64 ? 2 : 4;
    if (steps_of(threads_shift - lanes) > splits) {
      lanes = splits <= 16 ? 0 : min_of(32 - __clz((splits - 1) >> 4), 4);  // at most 16 each
#pragma unroll
      for (int more = kLoads / 2; more > 1; more /= 2) {
        if (wide && splits * more <= kLoads && row_vecs % more == 0) {
          vecs = more, per_row = row_vecs / more, items = rows * per_row;
          break;
        }
      }
    }
    lanes_shift = lanes, width_shift = threads_shift - lanes;
    const int all = steps_of(width_shift);
    steps = 1, units = all;
    if (all <= splits) return;
    steps = quotient(all + splits - 1, splits, __fdividef(1.f, splits));
    units = quotient(all + steps - 1, steps, __fdividef(1.f, steps));
  }

 private:
  __device__ __forceinline__ int steps_of(int shift) const { return (items + (1 << shift) - 1) >> shift; }
};

// Four values of a split, past L1: another SM wrote them.
template <bool kWide>
__device__ __forceinline__ float4 load_values(const float* at, int left) {
  if constexpr (kWide) return __ldcg(reinterpret_cast<const float4*>(at));
  return make_float4(__ldcg(at), left > 1 ? __ldcg(at + 1) : 0.f, left > 2 ? __ldcg(at + 2) : 0.f,
                     left > 3 ? __ldcg(at + 3) : 0.f);
}

// Four values of a merged row, rounded, at dim d of `out`.
__device__ __forceinline__ void store_values(const Params& p, const Shape& shape, uint16_t* out, int d, float4 v,
                                             float factor) {
  const float x = v.x * factor, y = v.y * factor, z = v.z * factor, w = v.w * factor;
  const bool bf16 = p.dtype == DType::kBFloat16;
  const uint2 rounded = bf16 ? make_uint2(pack2<__nv_bfloat16>(x, y), pack2<__nv_bfloat16>(z, w))
                             : make_uint2(pack2<__half>(x, y), pack2<__half>(z, w));
  if (shape.vector_out) {
    *reinterpret_cast<uint2*>(out + d) = rounded;
    return;
  }
#pragma unroll 1
  for (int i = 0; i < 4 && d + i < p.head_dim; ++i) {
    const uint32_t pair = i < 2 ? rounded.x : rounded.y;
    out[d + i] = static_cast<uint16_t>(i & 1 ? pair >> 16 : pair);
  }
}

// Merges a unit of items of kVecs vectors. A lane loads up to kMost of their splits at a time, all before the first
// use.
template <class Team, int kVecs, int kMost, bool kWide, bool kRagged>
__device__ __forceinline__ void merge_items(const Params& p, const Shape& shape, const WorkPlace& place,
                                            const Splits& splits, const ItemShares& shares, int unit, float* scratch) {
  static_assert(kVecs == 1 || kWide);
  const int thread = static_cast<int>(Team::thread()), width = 1 << shares.width_shift;
  const int item_lane = thread & (width - 1), split_lane = thread >> shares.width_shift;
  const int lanes = 1 << shares.lanes_shift;
  const float inverse = __fdividef(1.f, shares.per_row);
  // Rows of partial results: of this lane's splits but split 0, from which it is `row_step` to the next.
  const int split_rows = splits.step * shape.rows, row_step = split_rows << shares.lanes_shift;
  const int first_at = static_cast<int>(splits.first) * shape.rows;
  const int next_at = (static_cast<int>(splits.second) - splits.step) * shape.rows + split_lane * split_rows;
  const int own = (splits.count - split_lane + lanes - 1) >> shares.lanes_shift;
  const int nothing = shares.items >> 31;  // 0, which the compiler does not know
  const float v_scale = p.v_scale ? __ldg(p.v_scale + place.kv_head * p.v_scale_stride) : 1.f;
  const ResultPlace<kRagged> to(p, shape, place.request);
#pragma unroll 1
  for (int step = 0; step < shares.steps; ++step) {
    int item = ((unit * shares.steps + step) << shares.width_shift) + item_lane;
    const bool live = item < shares.items;
    if (kVecs > 1) item = min_of(item, shares.items - 1);
    const int own_row = quotient(item, shares.per_row, inverse), row = place.first_row + own_row;
    const int d = (item - own_row * shares.per_row) * 4, apart = shares.per_row * 4;
    const float* const lse_base = p.lse_partial + row;
    const float* const base = p.out_partial + row * p.head_dim + d;
    float top = -INFINITY, sum = 0.f;
    float4 total[kVecs];
#pragma unroll
    for (int k = 0; k < kVecs; ++k) total[k] = make_float4(0.f, 0.f, 0.f, 0.f);
    int first = 0;
#pragma unroll 1
    do {
      float lse[kMost];
      float4 values[kMost][kVecs];
      int at = first == 0 && split_lane == 0 ? first_at : next_at + first * row_step;
      int later = next_at + (first + 1) * row_step;
#pragma unroll
      for (int b = 0; b < kMost; ++b) {
        const float* from = base + static_cast<int64_t>(at) * p.head_dim;
        if constexpr (kVecs > 1) {
          // The last split again where there is none: there are too few predicates, and loads would wait for each
          // other.
          lse[b] = __ldcg(lse_base + at);
#pragma unroll
          for (int k = 0; k < kVecs; ++k, from += apart) values[b][k] = load_values<true>(from, 4);
        } else {
          const bool wanted = live && first + b < own;
          lse[b] = wanted ? __ldcg(lse_base + at) : -INFINITY;
          values[b][0] = wanted ? load_values<kWide>(from, p.head_dim - d) : make_float4(0.f, 0.f, 0.f, 0.f);
        }
        if (kVecs == 1 || b + 1 < own) at = later, later += row_step;
      }
      float highest = top;
#pragma unroll
      for (int b = 0; b < kMost; ++b) {
        if constexpr (kVecs > 1) {
          // Behind all loads: the compiler would else ask for values once their weight is known.
          int bits = __float_as_int(lse[b]);
#pragma unroll
          for (int k = 0; k < kVecs; ++k) bits ^= __float_as_int(values[b][k].w) & nothing;
          lse[b] = __int_as_float(bits);
          if (b >= own) lse[b] = -INFINITY;
        }
        highest = fmaxf(highest, lse[b]);
      }
      const float reference = highest == -INFINITY ? 0.f : highest;
      if (kVecs == 1 && first > 0) {
        const float factor = exp2_approx((top - reference) * kLog2e);
        sum *= factor;
        total[0].x *= factor, total[0].y *= factor, total[0].z *= factor, total[0].w *= factor;
      }
      top = highest;
#pragma unroll
      for (int b = 0; b < kMost; ++b) {
        const float weight = exp2_approx((lse[b] - reference) * kLog2e);
        sum += weight;
        if (weight == 0.f) continue;  // an empty split's row may hold anything; a NaN weight goes on: it must show
#pragma unroll
        for (int k = 0; k < kVecs; ++k) {
          total[k].x += weight * values[b][k].x, total[k].y += weight * values[b][k].y;
          total[k].z += weight * values[b][k].z, total[k].w += weight * values[b][k].w;
        }
      }
      first += kMost;
    } while (kVecs == 1 && first < own);
    if (kVecs == 1 && lanes > 1) {
      auto* const shared = reinterpret_cast<PartialSum*>(scratch);
      Team::sync();
      if (split_lane > 0) shared[thread] = PartialSum{top, sum, total[0]};
      Team::sync();
      if (split_lane > 0) continue;
      PartialSum all{top, sum, total[0]};
#pragma unroll 1
      for (int lane = 1; lane < lanes; ++lane) all.add(shared[(lane << shares.width_shift) + item_lane]);
      top = all.lse_max, sum = all.sum, total[0] = all.values;
    }
    if (!live || to.is_nobodys(row)) continue;
    const int token = shape.by_group.divide(row);
    const int head = place.kv_head * shape.group + row - token * shape.group;
    const bool empty = sum == 0.f;
    const float lse = empty ? -INFINITY : top + __logf(sum);
    float factor = empty ? 0.f : __fdividef(v_scale, sum);
    if (d == 0 && p.lse) p.lse[(to.token + token) * p.num_q_heads + head] = lse;
    if (p.sinks && lse != -INFINITY) factor = __fdividef(factor, 1.f + __expf(__ldg(p.sinks + head) - lse));
    auto* const out = static_cast<uint16_t*>(p.out) + to.at + token * p.out_stride_token + head * p.out_stride_head;
#pragma unroll
    for (int k = 0; k < kVecs; ++k) store_values(p, shape, out, d + k * apart, total[k], factor);
  }
}

// `merge_after_sync` of cuda/merge.cuh. kLoads: of 16 bytes that a thread has on their way at a time. kManyItems:
// whether a work may have more than its CTAs have threads.
template <class Team, int kLoads, bool kManyItems, bool kRagged = false>
__device__ __forceinline__ void merge_items_after_sync(const Params& p, const Shape& shape, const WorkPlace& place,
                                                       const Splits& splits, bool may_wait, MergeFlag* flag,
                                                       float* scratch) {
  static_assert(Team::kThreads == 128 || Team::kThreads == 256);
  const int rows = place.rows > 0 ? place.rows : shape.rows;
  ItemShares shares;
  shares.divide<kManyItems ? kLoads : 1>(rows, (p.head_dim + 3) >> 2, shape.wide_partials, splits.count,
                                         Team::kThreads == 256 ? 8 : 7);
  int32_t* semaphore = p.semaphores + place.work;
  Leave leave;
  if (Team::thread() == 0) {
    const Units units = arrive(semaphore, splits.count, splits.arrivals, shares.units, may_wait);
    *flag = {units.early, units.begin, units.end};
    if (units.must_leave) leave.begin(semaphore, splits.arrivals);
  }
  Team::sync();
  const int early = flag->early, begin = flag->begin, end = flag->end;
#pragma unroll 1
  for (int i = 0; i < early + end - begin; ++i) {
    const int unit = i < early ? i : begin + i - early;
    const auto merge = [&]<int kVecs, int kMost, bool kWide>() {
      merge_items<Team, kVecs, kMost, kWide, kRagged>(p, shape, place, splits, shares, unit, scratch);
    };
    if (!shape.wide_partials) {
      merge.template operator()<1, 4, false>();
    } else if (kManyItems && kLoads == 16 && shares.vecs == 8) {
      merge.template operator()<8, 2, true>();
    } else if (kManyItems && shares.vecs == 4) {
      merge.template operator()<4, kLoads / 4, true>();
    } else if (kManyItems && shares.vecs == 2) {
      merge.template operator()<2, kLoads / 2, true>();
    } else if (!kManyItems && splits.count <= 4) {
      merge.template operator()<1, 4, true>();
    } else {
      merge.template operator()<1, kLoads, true>();
    }
  }
  leave.finish(semaphore, splits.count, splits.arrivals);
}

}  // namespace attnops::xqa_decode::sm90
