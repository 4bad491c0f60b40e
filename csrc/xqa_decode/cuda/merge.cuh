#pragma once
#include <cmath>

#include "device/common/semaphore.cuh"
#include "device/sm80/mma.cuh"
#include "xqa_decode/cuda/pieces.cuh"

namespace attnops::xqa_decode {

// A work's place among the outputs. Where blocks of its rows are works of their own, `work` counts those, and they are
// `rows` from `first_row` on; rows 0: all.
struct WorkPlace {
  int work, request, kv_head;
  int first_row = 0, rows = 0;
};

// Four neighbouring values of a finished row, divided by its sum: v_scale and sink applied, rounded, stored.
// `lse` is the natural log. kFloat32: out is float32, else of either 16-bit type.
template <bool kFloat32 = false>
__device__ __forceinline__ void store_output(const Params& p, const Shape& shape, const WorkPlace& place, int row,
                                             int d, float4 values, float lse) {
  const int token = shape.by_group.divide(row);
  const int head = place.kv_head * shape.group + row - token * shape.group;
  if (d == 0 && p.lse) {
    p.lse[(static_cast<int64_t>(place.request) * p.seqlen_q + token) * p.num_q_heads + head] = lse;
  }
  float factor = p.v_scale ? __ldg(p.v_scale + place.kv_head * p.v_scale_stride) : 1.f;
  if (p.sinks && lse != -INFINITY) factor = __fdividef(factor, 1.f + __expf(__ldg(p.sinks + head) - lse));
  const float x = values.x * factor, y = values.y * factor, z = values.z * factor, w = values.w * factor;
  const int64_t at = place.request * p.out_stride_request + token * p.out_stride_token + head * p.out_stride_head + d;
  if constexpr (kFloat32) {
    float* out = static_cast<float*>(p.out) + at;
    const float all[4] = {x, y, z, w};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if (d + i < p.head_dim) out[i] = all[i];
    }
    return;
  }
  const bool bf16 = p.dtype == DType::kBFloat16;
  const uint2 rounded = bf16 ? make_uint2(pack2<__nv_bfloat16>(x, y), pack2<__nv_bfloat16>(z, w))
                             : make_uint2(pack2<__half>(x, y), pack2<__half>(z, w));
  uint16_t* out = static_cast<uint16_t*>(p.out) + at;
  if (shape.vector_out) {
    *reinterpret_cast<uint2*>(out) = rounded;
    return;
  }
#pragma unroll 1
  for (int i = 0; i < 4 && d + i < p.head_dim; ++i) {
    const uint32_t pair = i < 2 ? rounded.x : rounded.y;
    out[i] = static_cast<uint16_t>(i & 1 ? pair >> 16 : pair);
  }
}

// A result that nobody can take for an answer.
template <bool kFloat32 = false>
__device__ inline void store_nan(const Params& p, const Shape& shape, const WorkPlace& place, const Splits& splits,
                                 int threads = blockDim.x, unsigned thread = threadIdx.x) {
  if (p.report && thread == 0) {
    record_fault(p.report, {ReportOp::kXqaDecode, ReportKind::kLength, place.request, 0, splits.first + splits.count,
                            p.num_partials + 1});
  }
  const int vecs = ceil_div(p.head_dim, 4);
  for (int item = thread; item < shape.rows * vecs; item += threads) {
    store_output<kFloat32>(p, shape, place, item / vecs, item % vecs * 4, make_float4(NAN, NAN, NAN, NAN), NAN);
  }
}

// Row `slot * rows + row` of the partial results.
__device__ inline void store_partial(const Params& p, const Shape& shape, int64_t at, int d, float4 values, float lse) {
  if (d == 0) p.lse_partial[at] = lse;
  float* out = p.out_partial + at * p.head_dim + d;
  if (shape.wide_partials) {
    *reinterpret_cast<float4*>(out) = values;
    return;
  }
#pragma unroll 1
  for (int i = 0; i < 4 && d + i < p.head_dim; ++i) {
    out[i] = i == 0 ? values.x : i == 1 ? values.y : i == 2 ? values.z : values.w;
  }
}

// Past L1: another SM wrote it, and a line of L1 may be older.
__device__ inline float4 load_partial(const Params& p, const Shape& shape, int64_t at, int d) {
  const float* in = p.out_partial + at * p.head_dim + d;
  if (shape.wide_partials) return __ldcg(reinterpret_cast<const float4*>(in));
  const int left = p.head_dim - d;
  return make_float4(__ldcg(in), left > 1 ? __ldcg(in + 1) : 0.f, left > 2 ? __ldcg(in + 2) : 0.f,
                     left > 3 ? __ldcg(in + 3) : 0.f);
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

  __device__ PartialSum shuffled(int lanes) const {
    PartialSum other;
    other.lse_max = __shfl_xor_sync(~0u, lse_max, lanes);
    other.sum = __shfl_xor_sync(~0u, sum, lanes);
    other.values.x = __shfl_xor_sync(~0u, values.x, lanes);
    other.values.y = __shfl_xor_sync(~0u, values.y, lanes);
    other.values.z = __shfl_xor_sync(~0u, values.z, lanes);
    other.values.w = __shfl_xor_sync(~0u, values.w, lanes);
    return other;
  }

  __device__ void add(const PartialSum& other) {
    rescale(fmaxf(lse_max, other.lse_max));
    const float weight = other.lse_max == -INFINITY ? 0.f : __expf(other.lse_max - lse_max);
    sum += weight == 0.f ? 0.f : weight * other.sum;
    add(weight, other.values);
  }

  __device__ void add(float weight, float4 v) {
    if (weight == 0.f) return;  // an empty split's row may hold anything; a NaN weight goes on: it must show
    values.x += weight * v.x, values.y += weight * v.y, values.z += weight * v.z, values.w += weight * v.w;
  }
};

// The threads that merge a work: a CTA, less threads that have no part in merges and come after the others.
template <int kThreads_>
struct MergingCta {
  static constexpr int kThreads = kThreads_;
  static __device__ __forceinline__ unsigned thread() { return threadIdx.x; }
  static __device__ __forceinline__ void sync() { asm volatile("bar.sync 0, %0;\n" ::"n"(kThreads) : "memory"); }
};

template <int kThreads>
__device__ __forceinline__ void sync_threads() {
  MergingCta<kThreads>::sync();
}

// The merge of a work with many splits is cut into units that several CTAs take. An item is four values of a row.
struct MergeShape {
  int items;               // of the work
  int width, width_shift;  // items that a CTA merges at a time; its threads / width split the splits among themselves
  int steps;               // of `width` items in a unit
  int units;

  __device__ MergeShape(const Params& p, int rows, int splits, int threads_shift) {
    items = rows * ((p.head_dim + 3) >> 2);
    width_shift = threads_shift - (splits <= 16 ? 0 : splits <= 64 ? 2 : 4);
    width = 1 << width_shift;
    const int all_steps = (items + width - 1) >> width_shift;
    // As many units as there are CTAs that come to take one.
    steps = all_steps <= splits ? 1 : ceil_div(all_steps, splits);
    units = all_steps <= splits ? all_steps : ceil_div(all_steps, steps);
  }
};

// An item that all splits are in.
template <bool kFloat32>
__device__ __forceinline__ void store_merged(const Params& p, const Shape& shape, const WorkPlace& place, int row,
                                             int d, const PartialSum& state) {
  const bool empty = state.sum == 0.f;
  const float inverse = empty ? 0.f : __fdividef(1.f, state.sum);
  const float4 v = state.values;
  store_output<kFloat32>(p, shape, place, row, d,
                         make_float4(v.x * inverse, v.y * inverse, v.z * inverse, v.w * inverse),
                         empty ? -INFINITY : state.lse_max + __logf(state.sum));
}

// Merges one unit. Threads are item-major: neighbours have neighbouring items of one split. kBatch: splits that a
// thread loads at a time, all before the first use.
template <class Team, bool kFloat32, int kBatch>
__device__ __forceinline__ void merge_unit(const Params& p, const Shape& shape, const WorkPlace& place,
                                           const Splits& splits, const MergeShape& merge, int unit, float* scratch) {
  constexpr int kThreads = Team::kThreads;
  const unsigned thread = Team::thread();
  const int item_lane = thread & (merge.width - 1), split_lane = thread >> merge.width_shift;
  const int split_lanes = kThreads >> merge.width_shift;
  const int vecs = ceil_div(p.head_dim, 4);
  const int first_row = static_cast<int>(splits.first) * shape.rows, row_step = splits.step * shape.rows;
  const int before_second = static_cast<int>(splits.second) * shape.rows - row_step;
#pragma unroll 1
  for (int step = 0; step < merge.steps; ++step) {
    const int item = (unit * merge.steps + step) * merge.width + item_lane;
    const bool live = item < merge.items;
    const int own_row = live ? item / vecs : 0, d = live ? (item - own_row * vecs) * 4 : 0;
    const int row = place.first_row + own_row;
    PartialSum state;
#pragma unroll 1
    for (int first = split_lane; first < splits.count; first += split_lanes * kBatch) {
      float lse[kBatch];
      float4 values[kBatch];
#pragma unroll
      for (int b = 0; b < kBatch; ++b) {
        const int split = first + b * split_lanes;
        lse[b] = -INFINITY;
        values[b] = make_float4(0.f, 0.f, 0.f, 0.f);
        if (split < splits.count) {
          const int64_t at = (split == 0 ? first_row : before_second + split * row_step) + row;
          lse[b] = __ldcg(p.lse_partial + at);
          values[b] = load_partial(p, shape, at, d);
        }
      }
      float top = state.lse_max;
#pragma unroll
      for (int b = 0; b < kBatch; ++b) top = fmaxf(top, lse[b]);
      if (top != state.lse_max) state.rescale(top);
#pragma unroll
      for (int b = 0; b < kBatch; ++b) {
        const float weight = lse[b] == -INFINITY ? 0.f : __expf(lse[b] - top);
        state.sum += weight;
        state.add(weight, values[b]);
      }
    }
    // Over the split lanes: within the warp, then over the warps.
    for (int lanes = merge.width; lanes < 32; lanes *= 2) state.add(state.shuffled(lanes));
    if (split_lanes > 1) {
      auto* states = reinterpret_cast<PartialSum*>(scratch);
      const int warp = thread / 32;
      Team::sync();
      if (thread % 32 < merge.width) states[warp * 32 + thread % 32] = state;
      Team::sync();
      if (thread >= merge.width) continue;
#pragma unroll 1
      for (int w = max_of(merge.width / 32, 1); w < kThreads / 32; w += max_of(merge.width / 32, 1)) {
        state.add(states[w * 32 + thread]);
      }
    }
    if (live) store_merged<kFloat32>(p, shape, place, row, d, state);
  }
}

// The same for works of many rows and few splits, whose units have many steps: of kSteps of them all splits are loaded
// before one is used, up to kMost of each.
template <class Team, int kMost, int kSteps>
__device__ __forceinline__ void merge_steps(const Params& p, const Shape& shape, const WorkPlace& place,
                                            const Splits& splits, const MergeShape& merge, int unit) {
  const int vecs = ceil_div(p.head_dim, 4);
  const int first_row = static_cast<int>(splits.first) * shape.rows, row_step = splits.step * shape.rows;
  const int before_second = static_cast<int>(splits.second) * shape.rows - row_step;
#pragma unroll 1
  for (int step = 0; step < merge.steps; step += kSteps) {
    int rows[kSteps], dims[kSteps];
    float lse[kSteps][kMost];
    float4 values[kSteps][kMost];
#pragma unroll
    for (int k = 0; k < kSteps; ++k) {
      const int item = ((unit * merge.steps + step + k) << merge.width_shift) + static_cast<int>(Team::thread());
      const bool live = step + k < merge.steps && item < merge.items;
      const int own_row = live ? item / vecs : 0;
      rows[k] = live ? place.first_row + own_row : -1, dims[k] = live ? (item - own_row * vecs) * 4 : 0;
#pragma unroll
      for (int b = 0; b < kMost; ++b) {
        lse[k][b] = -INFINITY;
        values[k][b] = make_float4(0.f, 0.f, 0.f, 0.f);
        if (!live || b >= splits.count) continue;
        const int64_t at = (b == 0 ? first_row : before_second + b * row_step) + rows[k];
        lse[k][b] = __ldcg(p.lse_partial + at);
        values[k][b] = load_partial(p, shape, at, dims[k]);
      }
    }
#pragma unroll
    for (int k = 0; k < kSteps; ++k) {
      if (rows[k] < 0) continue;
      PartialSum state;
#pragma unroll
      for (int b = 0; b < kMost; ++b) state.lse_max = fmaxf(state.lse_max, lse[k][b]);
#pragma unroll
      for (int b = 0; b < kMost; ++b) {
        const float weight = lse[k][b] == -INFINITY ? 0.f : __expf(lse[k][b] - state.lse_max);
        state.sum += weight;
        state.add(weight, values[k][b]);
      }
      store_merged<false>(p, shape, place, rows[k], dims[k], state);
    }
  }
}

// How the splits of a work find each other. The semaphore counts the splits that have arrived and, above them, those
// that have left; it is zero before and after. A part that has nothing else to do waits a while for the others when it
// arrives, but never for long: nothing hangs when a part runs late, or has not even started. Every split has a unit of
// the merge: those that wait take the last one first, in the order in which they arrive. Who does not wait leaves at
// once, and the last to arrive merges for him: the first units. Who gives up says so before the last arrives, who then
// merges all. A part that made several splits arrives and leaves for all of them at once. Whoever merges a unit, its
// sums are formed in the order of the splits, of which there are less than 2^15.
inline constexpr unsigned kArrived = 0xffff;
inline constexpr unsigned kLeft = 0x10000;
inline constexpr unsigned kGaveUp = 0x80000000;
inline constexpr long long kPatienceNanoseconds = 100000;  // parts of long calls end that far apart
inline constexpr int kFewSplits = 4;

__device__ inline unsigned num_left(unsigned semaphore) { return (semaphore & ~kGaveUp) / kLeft; }

// The units that the caller must merge: [0, early) and [begin, end), no part of the former.
struct Units {
  int early, begin, end;
  bool must_leave;  // see Leave
};

// Waits for the others; false: they take too long, and the last to arrive knows.
__device__ inline bool wait_for_splits(int32_t* semaphore, unsigned all) {
  const long long give_up = now_nanoseconds() + kPatienceNanoseconds;
  unsigned seen = load_acquire(semaphore);
  while ((seen & kArrived) != all && now_nanoseconds() < give_up) seen = load_acquire(semaphore);
  while ((seen & kArrived) != all) {
    const unsigned before = compare_and_swap(semaphore, seen, seen | kGaveUp);
    if (before == seen) return false;
    seen = before;
  }
  return true;
}

// One thread of a CTA that has written the partial results of `own` splits.
__device__ inline Units arrive(int32_t* semaphore, int splits, int own, int units, bool may_wait) {
  const unsigned all = splits;
  if (units == 1) {
    if ((add_acq_rel(semaphore, own) & kArrived) + own != all) return {0, 0, 0, false};
    *semaphore = 0;
    return {0, 0, 1, false};
  }
  const unsigned before = add_acq_rel(semaphore, may_wait ? own : own * (1 + kLeft));
  const unsigned left = num_left(before), waiting = (before & kArrived) - left;
  const bool last = (before & kArrived) + own == all, gave_up = before & kGaveUp;
  // Below zero is far above, too: by counts that somebody else wrote.
  const auto up_to_all = [units](unsigned unit) {
    return static_cast<int>(min_of(unit, static_cast<unsigned>(units)));
  };
  int early = 0;
  if (last) early = gave_up ? units : up_to_all(may_wait ? left : left + own);
  if (!may_wait && left + own == all) *semaphore = 0;
  if (!may_wait || gave_up || (!last && !wait_for_splits(semaphore, all))) return {early, early, early, may_wait};
  const unsigned end = all - waiting;
  return {early, up_to_all(end - own), up_to_all(end), true};
}

// A part that waited leaves, once it knows its units. `finish` may come much later, so that nobody waits for memory:
// the semaphore is zero again once all have left.
class Leave {
 public:
  __device__ __forceinline__ void begin(int32_t* semaphore, int own) { before_ = add_relaxed(semaphore, own * kLeft); }
  __device__ __forceinline__ void finish(int32_t* semaphore, int splits, int own) const {
    if (num_left(before_) + own == static_cast<unsigned>(splits)) *semaphore = 0;
  }

 private:
  unsigned before_ = ~0u;  // more than there can be splits, where nobody has begun
};

// What the first thread of a team found out for the others: its units.
struct MergeFlag {
  int early, begin, end;
};

// Called by all threads of a team after a barrier that follows its partial results of a work. `flag` and `scratch`, a
// PartialSum for each thread, lie in shared memory.
template <class Team, int kBatch = 16, bool kFloat32 = false, bool kManyRows = false>
__device__ __forceinline__ void merge_after_sync(const Params& p, const Shape& shape, const WorkPlace& place,
                                                 const Splits& splits, bool may_wait, MergeFlag* flag, float* scratch) {
  static_assert(Team::kThreads == 128 || Team::kThreads == 256);
  const int rows = place.rows > 0 ? place.rows : shape.rows;
  const MergeShape merge(p, rows, splits.count, Team::kThreads == 256 ? 8 : 7);
  int32_t* semaphore = p.semaphores + place.work;
  Leave leave;
  if (Team::thread() == 0) {
    const Units units = arrive(semaphore, splits.count, splits.arrivals, merge.units, may_wait);
    *flag = {units.early, units.begin, units.end};
    if (units.must_leave) leave.begin(semaphore, splits.arrivals);
  }
  Team::sync();
  const int early = flag->early, begin = flag->begin, end = flag->end;
  const bool few = splits.count <= kFewSplits;  // a batch of more would be instructions for nothing
#pragma unroll 1
  for (int i = 0; i < early + end - begin; ++i) {
    const int unit = i < early ? i : begin + i - early;
    if (kManyRows && few) {
      merge_steps<Team, kFewSplits, 4>(p, shape, place, splits, merge, unit);
    } else if (kManyRows && splits.count <= 2 * kFewSplits) {
      merge_steps<Team, 2 * kFewSplits, 2>(p, shape, place, splits, merge, unit);
    } else if (few) {
      merge_unit<Team, kFloat32, kFewSplits>(p, shape, place, splits, merge, unit, scratch);
    } else {
      merge_unit<Team, kFloat32, kBatch>(p, shape, place, splits, merge, unit, scratch);
    }
  }
  leave.finish(semaphore, splits.count, splits.arrivals);
}

// The same once the CTA's partial results are written.
template <int kThreads, bool kFloat32 = false, bool kManyRows = false>
__device__ __forceinline__ void arrive_and_merge(const Params& p, const Shape& shape, const WorkPlace& place,
                                                 const Splits& splits, bool may_wait, MergeFlag* flag, float* scratch) {
  MergingCta<kThreads>::sync();
  merge_after_sync<MergingCta<kThreads>, 16, kFloat32, kManyRows>(p, shape, place, splits, may_wait, flag, scratch);
}

}  // namespace attnops::xqa_decode
