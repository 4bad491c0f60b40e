#pragma once
#include <cmath>

#include "mla_decode/sm90/epilogue.cuh"
#include "mla_decode/sm90/fp8_products/layout.h"
#include "mla_decode/sm90/fp8_products/softmax.cuh"

// From a transposed accumulator to the output or to a partial result.
namespace attnops::mla_decode::sm90::fp8_products {

// Where a row of the piece goes, in elements, and what its values are multiplied by; 0: it saw no key.
struct RowEnd {
  int64_t offset;
  float factor;
};

// By one thread per row: its sum over both groups, its lse, its place.
__device__ inline RowEnd end_of_row(const Params& p, const Piece& piece, int row, float sum, float maximum,
                                    float kv_scale) {
  const bool valid = row < piece.num_rows;
  const float lse = sum == 0.f ? -INFINITY : (maximum - kLift + log2f(sum)) * kLn2;  // a NaN sum goes on: it must show
  const float factor = sum == 0.f ? 0.f : kv_scale / sum;
  if (piece.partial >= 0) {
    const int64_t partial_row = static_cast<int64_t>(piece.partial) * kPlanRows + row;
    if (valid) p.lse_partial[partial_row] = lse;
    return {partial_row * kHeadDimV, factor};
  }
  const RowPlace at = row_place(p, piece.first_row + (valid ? row : 0));
  if (p.lse && valid) {
    p.lse[(static_cast<int64_t>(piece.request) * p.seqlen_q + at.token) * p.num_q_heads + at.head] = lse;
  }
  return {piece.request * p.out_stride_request + at.token * p.out_stride_token + at.head * p.out_stride_head,
          factor * sink_factor(p, at.head, lse)};
}

// In `o`, the thread has dims d and d + 1 of the rows 8 j + 2 (lane % 4) + {0, 1}, in each of four blocks of 64 dims;
// `store` gets a row's place at d, the block's distance from there, and the two values.
template <typename Store>
__device__ inline void for_columns(const Piece& piece, const RowEnd* ends, int group, const float (&o)[4][32],
                                   const Store& store) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x % kGroupThreads / 32;
  const int dim = group * 256 + warp * 16 + lane / 4 * 2;
#pragma unroll
  for (int j = 0; j < 8; ++j) {
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      const int row = 8 * j + 2 * (lane % 4) + e;
      if (row >= piece.num_rows) continue;
      const RowEnd end = ends[row];
#pragma unroll
      for (int block = 0; block < 4; ++block) {
        const float x = o[block][4 * j + e] * end.factor, y = o[block][4 * j + 2 + e] * end.factor;
        const bool empty = end.factor == 0.f;  // what sees nothing may hold 0 x NaN
        store(end.offset + dim, 64 * block, empty ? 0.f : x, empty ? 0.f : y);
      }
    }
  }
}

// One case of the three runs, once a piece, on a cold instruction cache: no case is to be decided inside the loop.
template <typename T>
__device__ inline void store_columns(const Params& p, const Piece& piece, const RowEnd* ends, int group, bool aligned,
                                     const float (&o)[4][32]) {
  T* const out = static_cast<T*>(p.out);
  if (piece.partial >= 0) {
    for_columns(piece, ends, group, o, [&](int64_t row, int at, float x, float y) {
      *reinterpret_cast<float2*>(p.out_partial + row + at) = {x, y};
    });
  } else if (aligned) {
    for_columns(piece, ends, group, o, [&](int64_t row, int at, float x, float y) {
      *reinterpret_cast<uint32_t*>(out + row + at) = attnops::sm90::pack_pair<T>(x, y);
    });
  } else {
    for_columns(piece, ends, group, o, [&](int64_t row, int at, float x, float y) {
      const uint32_t pair = attnops::sm90::pack_pair<T>(x, y);
      (out + row)[at] = reinterpret_cast<const T*>(&pair)[0];
      (out + row)[at + 1] = reinterpret_cast<const T*>(&pair)[1];
    });
  }
}

// Ends a piece; both groups call it. When it returns, nobody multiplies by the piece's queries any more.
template <typename T, class L>
__device__ inline void finish_piece(const Params& p, const Piece& piece, const RowState& rows, uint8_t* base, int group,
                                    float kv_scale, bool aligned, const float (&o)[4][32]) {
  float* sums = reinterpret_cast<float*>(base + L::kSums);
  float* maxima = reinterpret_cast<float*>(base + L::kMaxima);
  RowEnd* ends = reinterpret_cast<RowEnd*>(base + L::kP);  // probabilities are done with
  const int lane = threadIdx.x % 32, warp = threadIdx.x % kGroupThreads / 32;
#pragma unroll
  for (int h = 0; h < kRowsPerThread; ++h) {
    const float sum = quad_sum(rows.sum[h]);
    const int row = warp * 16 + lane / 4 + 8 * h;
    if (lane % 4 == 0) sums[group * 64 + row] = sum;
    if (lane % 4 == 0 && group == 0) maxima[row] = rows.maximum[h];
  }
  attnops::sm90::named_barrier_sync(kConsumers, kConsumerThreads);
  if (threadIdx.x < 64) {
    const int row = threadIdx.x;
    ends[row] = end_of_row(p, piece, row, sums[row] + sums[64 + row], maxima[row], kv_scale);
  }
  attnops::sm90::named_barrier_sync(kConsumers, kConsumerThreads);
  store_columns<T>(p, piece, ends, group, aligned, o);
}

}  // namespace attnops::mla_decode::sm90::fp8_products
