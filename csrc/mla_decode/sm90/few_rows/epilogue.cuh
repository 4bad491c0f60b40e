#pragma once
#include <cmath>

#include "mla_decode/sm90/epilogue.cuh"
#include "mla_decode/sm90/few_rows/softmax.cuh"

// From a transposed accumulator to the output or to a partial result. A thread holds, of its group's columns of V,
// those numbered 64 m + 16 warp + 8 h + lane / 4, each for its queries: element 4 j + 2 h + e of accumulator m.
namespace attnops::mla_decode::sm90::few_rows {

// Leaves what all warps must know of the rows in shared memory.
template <class At, int kGroup>
__device__ inline void publish_rows(const Softmax<At, kGroup>& rows, uint8_t* base) {
  float* sums = reinterpret_cast<float*>(base + At::kSums) + At::first_softmax_row(kGroup);
  float* references = reinterpret_cast<float*>(base + At::kReference) + At::first_softmax_row(kGroup);
  const int thread = threadIdx.x % kGroupThreads, lane = thread % 32, warp = thread / 32;
#pragma unroll
  for (int i = 0; i < At::kSoftmaxRows / 4; ++i) {
    const float sum = column_sum(rows.sum[i]);
    if (lane < 4) sums[warp * At::kRows + query_of(i)] = sum;
    if (thread < 4) references[query_of(i)] = rows.reference[i];
  }
}

struct RowResult {
  float sum, lse;  // lse in the natural logarithm
};

template <class At>
__device__ inline RowResult row_result(const uint8_t* base, int row) {
  const float* sums = reinterpret_cast<const float*>(base + At::kSums) + row;
  const float sum = (sums[0] + sums[At::kRows]) + (sums[2 * At::kRows] + sums[3 * At::kRows]);
  const float reference = reinterpret_cast<const float*>(base + At::kReference)[row];
  return {sum, sum == 0.f ? -INFINITY : (reference + log2f(sum)) * kLn2};  // a NaN sum goes on: it must show
}

// Float32 rows, divided by their sums; eight lanes write 32 bytes of a row.
template <class At>
__device__ inline void store_partial(const Params& p, const Piece& piece, const uint8_t* base, int group,
                                     const float (&o)[4][At::kRows / 2]) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x % kGroupThreads / 32;
#pragma unroll
  for (int i = 0; i < At::kQueries; ++i) {
    const int row = query_of(i);
    if (row >= piece.num_rows) continue;
    const RowResult result = row_result<At>(base, row);
    const float factor = 1.f / result.sum;
    const int64_t partial_row = static_cast<int64_t>(piece.partial) * kPlanRows + row;
    float* out = p.out_partial + partial_row * kHeadDimV + group * 256 + 16 * warp + lane / 4;
#pragma unroll
    for (int m = 0; m < 4; ++m) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        // What sees nothing may hold 0 x NaN.
        out[64 * m + 8 * h] = result.sum == 0.f ? 0.f : o[m][element_of(i, h)] * factor;
      }
    }
    if (threadIdx.x < 4) p.lse_partial[partial_row] = result.lse;
  }
}

// Rounded rows. The 8 x 8 blocks of a warp are transposed among its lanes first, so that a lane has two neighbouring
// columns of one query.
template <typename T, class At>
__device__ inline void store_output(const Params& p, const Piece& piece, const uint8_t* base, int group,
                                    const float (&o)[4][At::kRows / 2]) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x % kGroupThreads / 32;
  float factor[At::kQueries];
  bool empty[At::kQueries];
#pragma unroll
  for (int i = 0; i < At::kQueries; ++i) {
    const int row = min_of(query_of(i), piece.num_rows - 1);
    const RowResult result = row_result<At>(base, row);
    const RowPlace at = row_place(p, piece.first_row + row);
    empty[i] = result.sum == 0.f;
    factor[i] = sink_factor(p, at.head, result.lse) / result.sum;
    if (p.lse && threadIdx.x < 4 && query_of(i) < piece.num_rows) {
      p.lse[(static_cast<int64_t>(piece.request) * p.seqlen_q + at.token) * p.num_q_heads + at.head] = result.lse;
    }
  }
#pragma unroll
  for (int j = 0; j < At::kRows / 8; ++j) {
    const int row = 8 * j + lane / 4;
    const bool valid = row < piece.num_rows;
    const RowPlace at = row_place(p, piece.first_row + (valid ? row : 0));
    T* out = static_cast<T*>(p.out) + piece.request * p.out_stride_request + at.token * p.out_stride_token +
             at.head * p.out_stride_head + group * 256 + 16 * warp + 2 * (lane % 4);
#pragma unroll
    for (int m = 0; m < 4; ++m) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        float value[2];
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          value[e] = empty[2 * j + e] ? 0.f : o[m][4 * j + 2 * h + e] * factor[2 * j + e];
        }
        const uint32_t pair = attnops::sm90::transpose_matrix(attnops::sm90::pack_pair<T>(value[0], value[1]));
        if (!valid) continue;
        *reinterpret_cast<uint32_t*>(out + 64 * m + 8 * h) = pair;
      }
    }
  }
}

}  // namespace attnops::mla_decode::sm90::few_rows
