#pragma once
#include "core/linear_chunk.h"
#include "device/sm80/panel.cuh"

// The inverse of a chunk's unit lower triangle, for linear_chunk_local.cuh: made of blocks, in float32 and in pairs of
// bf16.
namespace attnops {

inline constexpr int kLocalThreads = 128;  // that make a chunk

// To the nearest with 10 bits of mantissa: products take no notice of the others. (cvt.rna looks for infinities by
// three more instructions.) A NaN may become 0; what multiplies its token's own keys and values still has it.
__device__ __forceinline__ uint32_t nearest_tf32(float x) { return __float_as_uint(x) + 0x1000u; }

// c += a b for blocks of 16 rows, 8 columns and 16 k of float32 matrices in shared memory, rounded to 11 bits. Which k
// a fragment's place stands for is free, so a lane's are neighbours.
__device__ __forceinline__ void multiply_block(float (&c)[4], const float* a, int a_stride, const float* b,
                                               int b_stride) {
  const int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int k = 8 * half + 2 * t;
    const float2 upper = *reinterpret_cast<const float2*>(a + g * a_stride + k);
    const float2 lower = *reinterpret_cast<const float2*>(a + (g + 8) * a_stride + k);
    const uint32_t rows[4] = {nearest_tf32(upper.x), nearest_tf32(lower.x), nearest_tf32(upper.y),
                              nearest_tf32(lower.y)};
    mma_m16n8k8_tf32(c, rows, nearest_tf32(b[k * b_stride + g]), nearest_tf32(b[(k + 1) * b_stride + g]));
  }
}

__device__ __forceinline__ void put_block(const float (&c)[4], float sign, float* to, int stride) {
  const int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
  *reinterpret_cast<float2*>(to + g * stride + 2 * t) = make_float2(sign * c[0], sign * c[1]);
  *reinterpret_cast<float2*>(to + (g + 8) * stride + 2 * t) = make_float2(sign * c[2], sign * c[3]);
}

// (1 + L)^-1 in the place of L, of the first `heads`, by four warps. What lies above the diagonal blocks is lost.
template <class Meet, class Made>
__device__ __forceinline__ void invert(Made& s, int heads) {
  constexpr int kStride = Made::kStride, kHeads = Made::kHeadsAtOnce;
  const auto x_at = [&](int h, int row, int column) { return &s.l[h].at[row][32 + column]; };  // above the diagonal
  static_assert(kHeads <= 2);
  const int warp = threadIdx.x % kLocalThreads / 32, lane = threadIdx.x % 32;
  {  // a diagonal block of each head a warp, a column a lane
    const int own = lane % 16, h = lane / 16 % kHeads;
    float* block = &s.l[h].at[16 * warp][16 * warp];
    float column[16];
#pragma unroll
    for (int i = 0; i < 16; ++i) {
      float sum = i == own ? 1.f : 0.f;
#pragma unroll
      for (int m = 0; m < i; m += 4) {
        const float4 row = *reinterpret_cast<const float4*>(block + i * kStride + m);
        sum = fmaf(-row.x, column[m], sum);
        if (m + 1 < i) sum = fmaf(-row.y, column[m + 1], sum);
        if (m + 2 < i) sum = fmaf(-row.z, column[m + 2], sum);
        if (m + 3 < i) sum = fmaf(-row.w, column[m + 3], sum);
      }
      column[i] = sum;
    }
    __syncwarp();
    if (lane / 16 < heads) {
#pragma unroll
      for (int i = 0; i < 16; ++i) block[i * kStride + own] = column[i];
    }
  }
  Meet::meet();
  {  // blocks (1, 0) and (3, 2), eight columns a warp
    const int upper = warp / 2 * 32, lower = upper + 16, column = warp % 2 * 8;
    float x[kHeads][4] = {}, y[kHeads][4] = {};
#pragma unroll
    for (int h = 0; h < kHeads; ++h) {
      if (h >= heads) break;
      auto& l = s.l[h].at;
      multiply_block(x[h], &l[lower][upper], kStride, &l[upper][upper + column], kStride);
      put_block(x[h], 1.f, x_at(h, warp / 2 * 16, column), kStride);
    }
    __syncwarp();
#pragma unroll
    for (int h = 0; h < kHeads; ++h) {
      if (h >= heads) break;
      multiply_block(y[h], &s.l[h].at[lower][lower], kStride, x_at(h, warp / 2 * 16, column), kStride);
    }
    Meet::meet();
#pragma unroll
    for (int h = 0; h < kHeads; ++h) {
      if (h < heads) put_block(y[h], -1.f, &s.l[h].at[lower][upper + column], kStride);
    }
  }
  Meet::meet();
  const int row = warp / 2 * 16, column = warp % 2 * 16;  // of the lower left half
  float x[kHeads][2][4] = {}, y[kHeads][2][4] = {};
  for (int k = column; k < 32; k += 16) {
#pragma unroll
    for (int i = 0; i < 2 * kHeads; ++i) {
      const int h = i / 2, n = i % 2;
      if (h >= heads) break;
      auto& l = s.l[h].at;
      multiply_block(x[h][n], &l[32 + row][k], kStride, &l[k][column + 8 * n], kStride);
    }
  }
#pragma unroll
  for (int i = 0; i < 2 * kHeads; ++i) {
    if (i / 2 < heads) put_block(x[i / 2][i % 2], 1.f, x_at(i / 2, row, column + 8 * (i % 2)), kStride);
  }
  Meet::meet();
  for (int k = 0; k <= row; k += 16) {
#pragma unroll
    for (int i = 0; i < 2 * kHeads; ++i) {
      const int h = i / 2, n = i % 2;
      if (h >= heads) break;
      multiply_block(y[h][n], &s.l[h].at[32 + row][32 + k], kStride, x_at(h, k, column + 8 * n), kStride);
    }
  }
#pragma unroll
  for (int i = 0; i < 2 * kHeads; ++i) {
    if (i / 2 < heads) put_block(y[i / 2][i % 2], -1.f, &s.l[i / 2].at[32 + row][column + 8 * (i % 2)], kStride);
  }
  Meet::meet();
}

// The inverse as a panel, its columns times the tokens' coefficients; zeros above the diagonal. A warp has whole
// blocks, 32 bytes of a row for each pair of lanes.
template <class Lower>
__device__ __forceinline__ void store_inverse(const Lower& l, const float* coefficients, unsigned char* to) {
  const int warp = threadIdx.x % kLocalThreads / 32, lane = threadIdx.x % 32;
#pragma unroll
  for (int block = 0; block < 4; ++block) {
    const int column_block = (warp + block) % 4, row = 16 * block + lane % 16, chunk = 2 * column_block + lane / 16;
    uint32_t words[4] = {};
    if (column_block <= block) {
      const int column = 8 * chunk;
      float x[8];
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const float4 of_row = *reinterpret_cast<const float4*>(&l.at[row][column + 4 * h]);
        const float4 scale = *reinterpret_cast<const float4*>(&coefficients[column + 4 * h]);
        x[4 * h] = of_row.x * scale.x, x[4 * h + 1] = of_row.y * scale.y;
        x[4 * h + 2] = of_row.z * scale.z, x[4 * h + 3] = of_row.w * scale.w;
      }
      if (column_block == block) {
#pragma unroll
        for (int i = 0; i < 8; ++i) x[i] = column + i > row ? 0.f : x[i];
      }
#pragma unroll
      for (int i = 0; i < 4; ++i) words[i] = pack2<__nv_bfloat16>(x[2 * i], x[2 * i + 1]);
    }
    *reinterpret_cast<uint4*>(to + panel_at(row, chunk)) = make_uint4(words[0], words[1], words[2], words[3]);
  }
}

}  // namespace attnops
