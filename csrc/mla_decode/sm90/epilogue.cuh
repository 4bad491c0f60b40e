#pragma once
#include <cmath>

#include "device/common/vec.h"
#include "device/sm90/barrier.cuh"
#include "device/sm90/wgmma.cuh"
#include "mla_decode/sm90/softmax.cuh"

// What the ends of pieces have in common.
namespace attnops::mla_decode::sm90 {

struct RowSums {
  float total[kRowsPerThread];
};

// Row sums of both groups. `parity` alternates from piece to piece, so that a slow reader is never overtaken.
__device__ inline RowSums exchange_sums(const RowState& rows, float* sums, uint32_t barrier, int parity, int group) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x % kGroupThreads / 32;
  float* own = sums + (parity * 2 + group) * 64;
  RowSums result;
#pragma unroll
  for (int h = 0; h < kRowsPerThread; ++h) {
    result.total[h] = quad_sum(rows.sum[h]);
    if (lane % 4 == 0) own[warp * 16 + lane / 4 + 8 * h] = result.total[h];
  }
  attnops::sm90::mbarrier_meet(barrier);
  const float* pair = sums + parity * 2 * 64;
#pragma unroll
  for (int h = 0; h < kRowsPerThread; ++h) {
    const int row = warp * 16 + lane / 4 + 8 * h;
    result.total[h] = pair[row] + pair[64 + row];
  }
  return result;
}

}  // namespace attnops::mla_decode::sm90
