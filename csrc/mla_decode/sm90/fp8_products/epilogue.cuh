#pragma once
#include "mla_decode/sm90/fp8_products/layout.h"
#include "mla_decode/sm90/fp8_products/softmax.cuh"
#include "mla_decode/sm90/transposed_results.cuh"

// The end of a piece.
namespace attnops::mla_decode::sm90::fp8_products {

static_assert(sizeof(TransposedEnds) == 64 * 16);

// No value of V is larger, without its scale; what rounding probabilities adds is in it.
inline constexpr float kMostValue = 480.f;

// By both groups. When it returns, nobody multiplies by the piece's queries any more.
template <typename T, Options kOptions>
__device__ inline void finish_piece(const Params& p, const Piece& piece, const RowState& rows, uint8_t* base, int group,
                                    float kv_scale, bool aligned, TransposedOutput& o) {
  float* sums = reinterpret_cast<float*>(base + Layout::kSums);
  float* maxima = reinterpret_cast<float*>(base + Layout::kReference);
  TransposedEnds& ends = *reinterpret_cast<TransposedEnds*>(base + Layout::kEnds);
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
    end_row<kOptions>(p, piece, row, sums[row] + sums[64 + row], maxima[row] - kLift, kv_scale, kMostValue, ends);
  }
  attnops::sm90::named_barrier_sync(kConsumers, kConsumerThreads);
  store_transposed<T, kOptions>(p, piece, ends, group, aligned, o);
}

}  // namespace attnops::mla_decode::sm90::fp8_products
