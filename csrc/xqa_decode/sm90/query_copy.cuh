#pragma once
#include "device/sm80/cp_async.cuh"
#include "xqa_decode/cuda/merge.cuh"
#include "xqa_decode/sm90/request_rows.cuh"
#include "xqa_decode/sm90/traits.cuh"

namespace attnops::xqa_decode::sm90 {

// Up to eight elements that may lie anywhere.
template <typename T>
__device__ __noinline__ void copy_odd_queries(uint32_t at, const T* from, int count) {
  static_assert(sizeof(T) == 2);
#pragma unroll 1
  for (int k = 0; k < 8; ++k) {
    const uint16_t bits = k < count ? *reinterpret_cast<const uint16_t*>(from + k) : uint16_t{0};
    asm volatile("st.shared.u16 [%0], %1;" ::"r"(at + 2 * k), "h"(bits) : "memory");
  }
}

// Starts the copies of a group's rows of q into shared memory, zeros where there are none, as the first product reads
// them. They go past registers, so that none waits for another.
template <class Tr>
__device__ __forceinline__ void copy_queries(const Params& p, const Shape& shape, const Boxes& boxes,
                                             const WorkPlace& place, int first_row, uint32_t queries) {
  constexpr int kVecsPerRow = Tr::kHeadDim / 8, kRowsAtATime = Tr::kGroupThreads / kVecsPerRow;
  using T = typename Tr::T;
  const int thread = threadIdx.x % Tr::kGroupThreads, d = thread % kVecsPerRow * 8;
  const uint32_t column = queries + d / 64 * (Tr::kGroupRows * 128);
  const QueryPlace<is_ragged<Tr>()> request(p, place.request);
  const T* q = static_cast<const T*>(p.q) + request.at;
  const int first_head = place.kv_head * shape.group;
  if (thread >= kRowsAtATime * kVecsPerRow) return;
  if (boxes.vector_queries) {
    const bool inside = d < p.head_dim;
    q += inside ? d : 0;
#pragma unroll
    for (int i = thread / kVecsPerRow; i < Tr::kGroupRows; i += kRowsAtATime) {
      const int row = min_of(first_row + i, shape.rows - 1), token = shape.by_group.divide(row);
      const int at = request.token(token) * boxes.q_token + (first_head + row - token * shape.group) * boxes.q_head;
      cp_async_16(column + hopper::swizzled(i, d / 8 % 8), q + at, inside && first_row + i < shape.rows);
    }
    return;
  }
#pragma unroll 1
  for (int i = thread / kVecsPerRow; i < Tr::kGroupRows; i += kRowsAtATime) {
    const int row = min_of(first_row + i, shape.rows - 1), token = shape.by_group.divide(row);
    const int head = first_head + row - token * shape.group;
    const T* from = q + request.token(token) * p.q_stride_token + head * p.q_stride_head + d;
    copy_odd_queries(column + hopper::swizzled(i, d / 8 % 8), from, first_row + i < shape.rows ? p.head_dim - d : 0);
  }
}

// The same for a warp alone, as xqa_decode::RowTile reads them.
template <class Warp>
__device__ __forceinline__ void copy_queries_of_warp(const Params& p, const Shape& shape, const Boxes& boxes,
                                                     int request, int kv_head, uint32_t queries, int lane) {
  constexpr int kVecsPerRow = Warp::kHeadDim / 8;
  using T = typename Warp::T;
  const T* q = static_cast<const T*>(p.q) + request * p.q_stride_request;
#pragma unroll 1
  for (int item = lane; item < shape.rows * kVecsPerRow; item += 32) {
    const int row = item / kVecsPerRow, vec = item % kVecsPerRow;
    const bool take = vec * 8 < p.head_dim;
    const int token = shape.by_group.divide(row), head = kv_head * shape.group + row - token * shape.group;
    const T* from = take ? q + token * p.q_stride_token + head * p.q_stride_head + vec * 8 : q;
    const uint32_t at = queries + row * (Warp::kHeadDim * 2) + ((vec ^ (row & 7)) << 4);
    if (boxes.vector_queries) {
      cp_async_16(at, from, take);
    } else {
      copy_odd_queries(at, from, take ? p.head_dim - vec * 8 : 0);
    }
  }
}

}  // namespace attnops::xqa_decode::sm90
