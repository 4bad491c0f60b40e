#pragma once
#include "core/linear_chunk.h"
#include "device/sm80/panel.cuh"

// The inverse of a chunk's unit lower triangle, for linear_chunk_local.cuh: made of blocks, in float32 and in pairs of
// bf16.
namespace attnops {

inline constexpr int kLocalThreads = 128;  // that make a chunk

// To the nearest with 10 bits of mantissa, for products alone, which take no notice of the others. (cvt.rna looks for
// infinities by three more instructions.) A NaN may become 0; what multiplies its token's own keys and values still has
// it.
__device__ __forceinline__ float near_tf32(float x) { return __uint_as_float(__float_as_uint(x) + 0x1000u); }

// The same without the other bits. A NaN stays one.
__device__ __forceinline__ float nearest_tf32(float x) {
  const float large = __fmul_rn(8193.f, x);
  return __fsub_rn(large, __fsub_rn(large, x));
}

// c += a b for blocks of 16 rows, 8 columns and 16 k of matrices in shared memory, which have been rounded. Which k a
// fragment's place stands for is free, so a lane's are neighbours.
__device__ __forceinline__ void multiply_block(float (&c)[4], const float* a, int a_stride, const float* b,
                                               int b_stride) {
  const int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int k = 8 * half + 2 * t;
    const float2 upper = *reinterpret_cast<const float2*>(a + g * a_stride + k);
    const float2 lower = *reinterpret_cast<const float2*>(a + (g + 8) * a_stride + k);
    const uint32_t rows[4] = {__float_as_uint(upper.x), __float_as_uint(lower.x), __float_as_uint(upper.y),
                              __float_as_uint(lower.y)};
    mma_m16n8k8_tf32(c, rows, __float_as_uint(b[k * b_stride + g]), __float_as_uint(b[(k + 1) * b_stride + g]));
  }
}

__device__ __forceinline__ void put_block(const float (&c)[4], float* to, int stride) {
  const int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
  *reinterpret_cast<float2*>(to + g * stride + 2 * t) = make_float2(c[0], c[1]);
  *reinterpret_cast<float2*>(to + (g + 8) * stride + 2 * t) = make_float2(c[2], c[3]);
}

// The same of what becomes an operand of products alone.
__device__ __forceinline__ void put_operand(const float (&c)[4], float* to, int stride) {
  const float near[4] = {near_tf32(c[0]), near_tf32(c[1]), near_tf32(c[2]), near_tf32(c[3])};
  put_block(near, to, stride);
}

// (1 + C L)^-1 C in the place of L, of the first `heads`, by four warps. C is diagonal, a head's numbers at
// `coefficients` + stride h. What lies above the diagonal blocks is lost, what lies below them has been rounded.
template <class Meet, class Made>
__device__ __forceinline__ void invert(Made& s, int heads, const float* coefficients, int stride) {
  constexpr int kStride = Made::kStride, kHeads = Made::kHeadsAtOnce;
  const auto x_at = [&](int h, int row, int column) { return &s.l[h].at[row][32 + column]; };  // above the diagonal
  static_assert(kHeads <= 2);
  const int warp = threadIdx.x % kLocalThreads / 32, lane = threadIdx.x % 32;
  {  // a diagonal block of each head a warp, a column a lane
    const int own = lane % 16, h = lane / 16 % kHeads;
    float* block = &s.l[h].at[16 * warp][16 * warp];
    const float* scales = coefficients + (h < heads ? h * stride : 0) + 16 * warp;
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
      column[i] = scales[i] * sum;
    }
    __syncwarp();
    if (lane / 16 < heads) {
#pragma unroll
      for (int i = 0; i < 16; ++i) block[i * kStride + own] = nearest_tf32(column[i]);
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
      put_operand(x[h], x_at(h, warp / 2 * 16, column), kStride);
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
      const float rounded[4] = {-nearest_tf32(y[h][0]), -nearest_tf32(y[h][1]), -nearest_tf32(y[h][2]),
                                -nearest_tf32(y[h][3])};
      if (h < heads) put_block(rounded, &s.l[h].at[lower][upper + column], kStride);
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
    if (i / 2 < heads) put_operand(x[i / 2][i % 2], x_at(i / 2, row, column + 8 * (i % 2)), kStride);
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
    float(&own)[4] = y[i / 2][i % 2];
#pragma unroll
    for (float& number : own) number = -number;
    if (i / 2 < heads) put_block(own, &s.l[i / 2].at[32 + row][column + 8 * (i % 2)], kStride);
  }
  Meet::meet();
}

// The inverse as a panel. A warp has 16 columns, 32 bytes of a row for each pair of lanes. Zeros are above the
// diagonal, in its blocks since `invert` leaves them there.
template <class Lower>
__device__ __forceinline__ void store_inverse(const Lower& l, unsigned char* to) {
  const int warp = threadIdx.x % kLocalThreads / 32, lane = threadIdx.x % 32;
  const int row = lane % 16, chunk = 2 * warp + lane / 16;
  const float* from = &l.at[row][8 * chunk];
  to += panel_at(row, chunk);
#pragma unroll
  for (int block = 0; block < 4; ++block) {
    uint4 words = make_uint4(0, 0, 0, 0);
    if (block >= warp) {
      const float4 low = *reinterpret_cast<const float4*>(from + 16 * block * Lower::kRow);
      const float4 high = *reinterpret_cast<const float4*>(from + 16 * block * Lower::kRow + 4);
      words = make_uint4(pack2<__nv_bfloat16>(low.x, low.y), pack2<__nv_bfloat16>(low.z, low.w),
                         pack2<__nv_bfloat16>(high.x, high.y), pack2<__nv_bfloat16>(high.z, high.w));
    }
    *reinterpret_cast<uint4*>(to + 16 * block * 128) = words;
  }
}

}  // namespace attnops
