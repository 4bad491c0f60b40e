#pragma once
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <type_traits>

#include "core/linear_step.h"
#include "core/math.h"
#include "core/state_report.h"
#include "device/common/arch.h"
#include "device/common/launch_dependent.cuh"
#include "device/common/row_vec.cuh"
#include "device/common/vec.h"

// Rows of states: who has them, how they come and go, and how they are asked for ahead.
namespace attnops {

inline constexpr int kStepThreads = 128;
inline constexpr int kLaneElements = 16;
inline constexpr int kStepRows = 2;  // of a thread: 128 bytes in flight

// Of an SM, where a thread has so many rows.
inline constexpr int step_ctas(int rows) { return rows > kStepRows ? 4 : 5; }

// To an element of a tensor of any of the three types that tokens have.
__device__ __forceinline__ void store_as(DType dtype, void* data, int64_t i, float x) {
  if (dtype == DType::kBFloat16) {
    static_cast<__nv_bfloat16*>(data)[i] = __float2bfloat16(x);
  } else if (dtype == DType::kFloat16) {
    static_cast<__half*>(data)[i] = __float2half(x);
  } else {
    static_cast<float*>(data)[i] = x;
  }
}

template <typename State>
__device__ __forceinline__ State to_state(float x) {
  if constexpr (sizeof(State) == 4) return x;
  if constexpr (std::is_same_v<State, __nv_bfloat16>) return __float2bfloat16(x);
  if constexpr (std::is_same_v<State, __half>) return __float2half(x);
}

// Of what is used once: it leaves L2 first.
__device__ __forceinline__ uint64_t used_once() {
  uint64_t policy = 0;
#if __CUDA_ARCH__ >= 800
  asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
#endif
  return policy;
}

// Of what will be used again soon.
__device__ __forceinline__ uint64_t used_again() {
  uint64_t policy = 0;
#if __CUDA_ARCH__ >= 800
  asm("createpolicy.fractional.L2::evict_normal.b64 %0, 1.0;" : "=l"(policy));
#endif
  return policy;
}

// 16 bytes of a state. Those of 16 bits are written as what is used once, and read as others are: batches of 64 took
// 41 us for 43. kOnce: of float32, what leaves L2 first; decode took 73 us for 76, with a convolution in front 95
// for 91.
template <bool kOnce, typename V, typename State>
__device__ __forceinline__ V load_state(const State* from) {
#if __CUDA_ARCH__ >= 800
  if constexpr (kOnce && sizeof(State) == 4) {
    uint4 words;
    asm volatile("ld.global.L1::no_allocate.L2::cache_hint.v4.u32 {%0, %1, %2, %3}, [%4], %5;"
                 : "=r"(words.x), "=r"(words.y), "=r"(words.z), "=r"(words.w)
                 : "l"(from), "l"(used_once()));
    return *reinterpret_cast<const V*>(&words);
  }
#endif
  return load_vec<V>(from);
}

template <bool kOnce, typename V, typename State>
__device__ __forceinline__ void store_state(State* to, const V& vec) {
  const uint4 words = *reinterpret_cast<const uint4*>(&vec);
  if constexpr (sizeof(State) == 2) return __stcs(reinterpret_cast<uint4*>(to), words);
#if __CUDA_ARCH__ >= 800
  if constexpr (kOnce) {
    asm volatile("st.global.L2::cache_hint.v4.u32 [%0], {%1, %2, %3, %4}, %5;" ::"l"(to), "r"(words.x), "r"(words.y),
                 "r"(words.z), "r"(words.w), "l"(used_once())
                 : "memory");
    return;
  }
#endif
  store_vec(to, vec);
}

// What a group of kLanes lanes holds of a row of `State`: element i of a lane is column `column(i)`.
template <typename State, int kLanes>
struct RowPart {
  static constexpr int kVec = 16 / static_cast<int>(sizeof(State));
  static constexpr int kVecs = kLaneElements / kVec;

  __device__ static int column(int lane, int i) { return (i / kVec * kLanes + lane) * kVec + i % kVec; }

  // Columns from `dim` on are 0 and are not read.
  template <bool kVectors, bool kOnce = false>
  __device__ static void load(float (&x)[kLaneElements], const State* row, int lane, int dim) {
#pragma unroll
    for (int j = 0; j < kVecs; ++j) {
      const int first = column(lane, j * kVec);
      if constexpr (kVectors) {
        RowVec<State, kVec> vec{};
        if (first < dim) vec = load_state<kOnce, RowVec<State, kVec>>(row + first);
#pragma unroll
        for (int i = 0; i < kVec; ++i) x[j * kVec + i] = vec.at(i);
      } else {
#pragma unroll
        for (int i = 0; i < kVec; ++i) {
          x[j * kVec + i] = first + i < dim ? static_cast<float>(row[first + i]) : 0.f;
        }
      }
    }
  }

  template <bool kVectors, bool kOnce = false>
  __device__ static void store(const float (&x)[kLaneElements], State* row, int lane, int dim) {
#pragma unroll
    for (int j = 0; j < kVecs; ++j) {
      const int first = column(lane, j * kVec);
      Vec<State, kVec> vec;
#pragma unroll
      for (int i = 0; i < kVec; ++i) vec.data[i] = to_state<State>(x[j * kVec + i]);
      if constexpr (kVectors) {
        if (first < dim) store_state<kOnce>(row + first, vec);
      } else {
#pragma unroll
        for (int i = 0; i < kVec; ++i) {
          if (first + i < dim) row[first + i] = vec.data[i];
        }
      }
    }
  }
};

// The sum over a group of kLanes lanes that start at a multiple of it, in the same order in every lane.
template <int kLanes>
__device__ __forceinline__ float sum_of_lanes(float x) {
#pragma unroll
  for (int distance = kLanes / 2; distance > 0; distance /= 2) x += __shfl_xor_sync(0xffffffffu, x, distance);
  return x;
}

// Where a request's state comes from and goes to; null: nowhere. Out-of-range slots are recorded and not touched.
template <typename State>
struct StepSlots {
  const State* from;
  State* to;

  __device__ StepSlots(const LinearStep& p, ReportOp op, int request, int head, bool reports)
      : from(nullptr), to(nullptr) {
    const int64_t source = p.state_indices[request];
    const int64_t target = p.out_state_indices == nullptr ? source : p.out_state_indices[request];
    State* states = static_cast<State*>(p.states) + int64_t{head} * p.stride_head;
    if (source >= 0 && source < p.num_slots) from = states + source * p.stride_slot;
    if (target >= 0 && target < p.num_slots && from != nullptr) to = states + target * p.stride_slot;
    if (p.report == nullptr || !reports) return;
    for (const int64_t slot : {source, target}) {
      if (slot >= p.num_slots) record_fault(p.report, {op, kReportStateSlot, request, 0, slot, p.num_slots});
    }
    const int32_t* targets = p.out_state_indices == nullptr ? p.state_indices : p.out_state_indices;
    for (int other = 0; other < request && target >= 0; ++other) {
      if (targets[other] == target) record_fault(p.report, {op, kReportSharedSlot, request, other, target, 0});
    }
  }
};

// Asks for some rows of a slot's state to be in L2 soon. By one thread.
template <typename State>
__device__ __forceinline__ void ask_for_rows(const LinearStep& p, int64_t slot, int head, int first_row, int rows) {
#if __CUDA_ARCH__ >= 900
  const int here = min_of(rows, p.value_dim - first_row);
  if (slot < 0 || slot >= p.num_slots || here <= 0) return;
  const State* from =
      static_cast<const State*>(p.states) + slot * p.stride_slot + head * p.stride_head + first_row * p.stride_row;
  asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(from),
               "r"(here * p.key_dim * static_cast<int>(sizeof(State)))
               : "memory");
#endif
}

// The same of a later request.
template <typename State>
__device__ __forceinline__ void ask_for_state(const LinearStep& p, int request, int head, int first_row, int rows) {
  if (request < p.batch_size) ask_for_rows<State>(p, p.state_indices[request], head, first_row, rows);
}

// How many requests ahead CTAs ask for states: about as many as run at the same time, `ctas` an SM. More would drive
// out of L2 what is still to come.
inline int requests_ahead(const char* what, const LinearStep& p, int ctas_of_request, int ctas) {
  const bool dense = p.stride_row == p.key_dim;  // what is asked for is one piece
  return dense ? ceil_div(ctas * device_sms(what), max_of(ctas_of_request, 1)) : 0;
}

}  // namespace attnops
