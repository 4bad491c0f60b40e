#pragma once
#include <cmath>

#include "core/divisor.h"
#include "mla_decode/sm90/epilogue.cuh"
#include "mla_decode/sm90/few_rows/softmax.cuh"
#include "mla_decode/sm90/few_rows/walk.cuh"

// From a transposed accumulator to the output or to a partial result.
//
// A result is a set of blocks of 8 rows x 16 columns, a block a warp's: block j of accumulator m holds, in elements
// 4 j + 2 h + e, rows 8 j + 2 (lane % 4) + e and columns 64 m + 16 warp + 8 h + lane / 4 of the group's columns of V.
namespace attnops::mla_decode::sm90::few_rows {

// Leaves what all warps must know of the rows in shared memory.
template <class At>
__device__ inline void publish_rows(const Softmax<At>& rows, uint8_t* base) {
  float* sums = reinterpret_cast<float*>(base + At::kSums) + At::first_softmax_row(rows.group);
  float* references = reinterpret_cast<float*>(base + At::kReference) + At::first_softmax_row(rows.group);
  publish_states<At>(rows.reference, rows.sum, sums, references);
  if constexpr (At::kSelects) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x % kGroupThreads / 32;
    float* tops = reinterpret_cast<float*>(base + At::kTops) + warp * At::kRows + At::first_softmax_row(rows.group);
#pragma unroll
    for (int i = 0; i < Softmax<At>::kCount; ++i) {
      const float most = column_max(rows.most[i]);
      if (lane < 4) tops[query_of(i)] = most;
    }
  }
}

// What a softmax knows of a row: the sum of its exponentials under a reference, in the base-2 logarithm.
struct RowState {
  float reference, sum;

  __device__ bool empty() const { return sum == 0.f; }  // a NaN sum goes on: it must show
  __device__ float lse() const { return empty() ? -INFINITY : (reference + log2f(sum)) * kLn2; }
};

template <class At>
__device__ inline RowState row_state(const uint8_t* base, int row) {
  const float* sums = reinterpret_cast<const float*>(base + At::kSums) + row;
  return {reinterpret_cast<const float*>(base + At::kReference)[row],
          (sums[0] + sums[At::kRows]) + (sums[2 * At::kRows] + sums[3 * At::kRows])};
}

// The number of a block, and its first column of V.
template <class At>
__device__ inline int block_number(int group, int warp, int m, int j) {
  return ((group * 4 + warp) * 4 + m) * At::kRowBlocks + j;
}

template <class At>
__device__ inline int column_of_block(int block) {
  const int m = block / At::kRowBlocks % 4, warp = block / At::kRowBlocks / 4;  // of both groups
  return warp / 4 * 256 + m * 64 + warp % 4 * 16;
}

// A partial result: blocks one after the other, of each a float4 of every lane, and then RowState of all rows.
__device__ inline float4* partial_blocks(const Params& p, int slot) {
  return reinterpret_cast<float4*>(p.out_partial + static_cast<int64_t>(slot) * (kPlanRows * kHeadDimV));
}

template <class At>
__device__ inline float* partial_rows(const Params& p, int slot) {
  static_assert(At::kRows * (kHeadDimV + 2) <= kPlanRows * kHeadDimV);
  return p.out_partial + static_cast<int64_t>(slot) * (kPlanRows * kHeadDimV) + At::kRows * kHeadDimV;
}

// What sees nothing may hold 0 x NaN.
template <class At>
__device__ inline void clear_empty_rows(const RowState (&rows)[At::kQueries], float (&o)[4][At::kRows / 2]) {
  bool any = false;
#pragma unroll
  for (const RowState& row : rows) any |= row.empty();
  if (!any) return;
#pragma unroll
  for (int i = 0; i < At::kQueries; ++i) {
#pragma unroll
    for (int m = 0; m < 4; ++m) {
#pragma unroll
      for (int h = 0; h < 2; ++h) o[m][element_of(i, h)] = rows[i].empty() ? 0.f : o[m][element_of(i, h)];
    }
  }
}

template <class At>
__device__ inline void store_partial(const Params& p, int slot, const uint8_t* base, int group,
                                     const float (&o)[4][At::kRows / 2]) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x % kGroupThreads / 32;
  float4* const blocks = partial_blocks(p, slot) + block_number<At>(group, warp, 0, 0) * 32 + lane;
#pragma unroll
  for (int m = 0; m < 4; ++m) {
#pragma unroll
    for (int j = 0; j < At::kRowBlocks; ++j) {
      __stcg(blocks + (m * At::kRowBlocks + j) * 32,
             make_float4(o[m][4 * j], o[m][4 * j + 1], o[m][4 * j + 2], o[m][4 * j + 3]));
    }
  }
  if (threadIdx.x < At::kRows) {
    const RowState row = row_state<At>(base, threadIdx.x);
    __stcg(reinterpret_cast<float2*>(partial_rows<At>(p, slot)) + threadIdx.x, make_float2(row.reference, row.sum));
  }
}

// Where the results of a piece's rows go.
template <typename T>
struct RowOutput {
  const Params& p;
  int request, num_rows;

  __device__ bool valid(int row) const { return row < num_rows; }

  // The first column of a row that may be a spare one.
  __device__ T* begin(int row) const {
    const RowPlace at = row_place(p, valid(row) ? row : 0);
    return static_cast<T*>(p.out) + request * p.out_stride_request + at.token * p.out_stride_token +
           at.head * p.out_stride_head;
  }

  // What the values of a row are multiplied by; empty rows hold zeros.
  __device__ float factor(int row, const RowState& state) const {
    const float factor = state.empty() ? 0.f : __fdividef(1.f, state.sum);
    if (!p.sinks || !valid(row)) return factor;
    return factor * sink_factor(p, row_place(p, row).head, state.lse());
  }

  __device__ void store_lse(int row, const RowState& state) const {
    if (!valid(row)) return;
    const RowPlace at = row_place(p, row);
    p.lse[(static_cast<int64_t>(request) * p.seqlen_q + at.token) * p.num_q_heads + at.head] = state.lse();
  }
};

// A block of finished values, rounded. Its halves are transposed among the lanes, so that a lane has two neighbouring
// columns of row lane / 4; `out` is where the first of them goes.
template <typename T>
__device__ inline void store_block(T* out, bool valid, const float (&values)[4]) {
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const uint32_t pair =
        attnops::sm90::transpose_matrix(attnops::sm90::pack_pair<T>(values[2 * h], values[2 * h + 1]));
    if (valid) *reinterpret_cast<uint32_t*>(out + 8 * h) = pair;
  }
}

template <typename T, class At>
__device__ inline void store_output(const RowOutput<T>& output, int group, const RowState (&rows)[At::kQueries],
                                    const float (&o)[4][At::kRows / 2]) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x % kGroupThreads / 32;
  if (output.p.lse && threadIdx.x < 4) {
#pragma unroll
    for (int i = 0; i < At::kQueries; ++i) output.store_lse(query_of(i), rows[i]);
  }
#pragma unroll
  for (int j = 0; j < At::kRowBlocks; ++j) {
    const int row = 8 * j + lane / 4;
    T* out = output.begin(row) + group * 256 + 16 * warp + 2 * (lane % 4);
    float factor[2];
#pragma unroll
    for (int e = 0; e < 2; ++e) factor[e] = output.factor(query_of(2 * j + e), rows[2 * j + e]);
#pragma unroll
    for (int m = 0; m < 4; ++m) {
      float values[4];
#pragma unroll
      for (int x = 0; x < 4; ++x) values[x] = o[m][4 * j + x] * factor[x % 2];
      store_block<T>(out + 64 * m, output.valid(row), values);
    }
  }
}

}  // namespace attnops::mla_decode::sm90::few_rows
