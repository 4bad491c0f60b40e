#pragma once
#include <cmath>

#include "device/common/vec.h"
#include "device/sm90/barrier.cuh"
#include "device/sm90/wgmma.cuh"
#include "mla_decode/sm90/softmax.cuh"

// From an accumulator to the output or to a partial result.
namespace attnops::mla_decode::sm90 {

struct RowSums {
  float total[kRowsPerThread];
};

// Row sums of both groups. `parity` alternates from piece to piece, so that a slow reader is never overtaken.
__device__ inline RowSums exchange_sums(const RowState& rows, float* sums, int parity, int group) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x % kGroupThreads / 32;
  float* own = sums + (parity * 2 + group) * 64;
  RowSums result;
#pragma unroll
  for (int h = 0; h < kRowsPerThread; ++h) {
    result.total[h] = quad_sum(rows.sum[h]);
    if (lane % 4 == 0) own[warp * 16 + lane / 4 + 8 * h] = result.total[h];
  }
  attnops::sm90::named_barrier_sync(kRowSums, kConsumerThreads);
  const float* pair = sums + parity * 2 * 64;
#pragma unroll
  for (int h = 0; h < kRowsPerThread; ++h) {
    const int row = warp * 16 + lane / 4 + 8 * h;
    result.total[h] = pair[row] + pair[64 + row];
  }
  return result;
}

// Transposes 4 x 4 words among the four lanes of a quad: lane t gives words 0 .. 3 and gets word t of lanes 0 .. 3.
__device__ inline void transpose_quad(uint32_t (&w)[4]) {
  const bool odd = threadIdx.x & 1, upper = threadIdx.x & 2;
#pragma unroll
  for (int i = 0; i < 4; i += 2) {
    const uint32_t other = __shfl_xor_sync(0xffffffffu, odd ? w[i] : w[i + 1], 1);
    (odd ? w[i] : w[i + 1]) = other;
  }
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const uint32_t other = __shfl_xor_sync(0xffffffffu, upper ? w[i] : w[i + 2], 2);
    (upper ? w[i] : w[i + 2]) = other;
  }
}

// Rows of the output that start on 16-byte boundaries are written in 16-byte vectors, any others by element.
inline bool output_aligned(const Params& p) {
  return rows_aligned(p.out, size_of(p.dtype), 16, p.out_stride_request, p.out_stride_token, p.out_stride_head);
}

// Writes this group's 256 of the 512 columns of the piece's rows.
template <typename T>
__device__ inline void store_rows(const Params& p, const Piece& piece, const RowState& rows, const RowSums& sums,
                                  int group, bool aligned, const float (&o)[128]) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x % kGroupThreads / 32;
#pragma unroll
  for (int h = 0; h < kRowsPerThread; ++h) {
    const int row = warp * 16 + lane / 4 + 8 * h;
    const bool valid = row < piece.num_rows;
    const float sum = sums.total[h];
    const float lse =
        sum == 0.f ? -INFINITY : (rows.maximum[h] + log2f(sum)) * kLn2;  // a NaN sum goes on: it must show
    float factor = 1.f / sum;
    const auto value = [&](int i) { return sum == 0.f ? 0.f : o[i] * factor; };  // what sees nothing may hold 0 x NaN
    if (piece.partial >= 0) {
      const int64_t partial_row = static_cast<int64_t>(piece.partial) * kPlanRows + row;
      float* out = p.out_partial + partial_row * kHeadDimV + group * 256 + 2 * (lane % 4);
      if (!valid) continue;
#pragma unroll
      for (int j = 0; j < 32; ++j) {
        *reinterpret_cast<float2*>(out + 8 * j) = {value(4 * j + 2 * h), value(4 * j + 2 * h + 1)};
      }
      if (group == 0 && lane % 4 == 0) p.lse_partial[partial_row] = lse;
      continue;
    }
    const RowPlace at = row_place(p, piece.first_row + (valid ? row : 0));
    factor *= sink_factor(p, at.head, lse);
    T* out = static_cast<T*>(p.out) + piece.request * p.out_stride_request + at.token * p.out_stride_token +
             at.head * p.out_stride_head + group * 256 + 8 * (lane % 4);
#pragma unroll
    for (int j = 0; j < 32; j += 4) {
      uint32_t words[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        words[i] = attnops::sm90::pack_pair<T>(value(4 * (j + i) + 2 * h), value(4 * (j + i) + 2 * h + 1));
      }
      transpose_quad(words);
      if (!valid) continue;
      if (aligned) {
        *reinterpret_cast<uint4*>(out + 8 * j) = {words[0], words[1], words[2], words[3]};
      } else {
#pragma unroll
        for (int i = 0; i < 8; ++i) out[8 * j + i] = reinterpret_cast<const T*>(words)[i];
      }
    }
    if (p.lse && valid && group == 0 && lane % 4 == 0) {
      p.lse[(static_cast<int64_t>(piece.request) * p.seqlen_q + at.token) * p.num_q_heads + at.head] = lse;
    }
  }
}

}  // namespace attnops::mla_decode::sm90
