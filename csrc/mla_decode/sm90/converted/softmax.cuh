#pragma once
#include "mla_decode/sm90/converted/layout.h"
#include "mla_decode/sm90/softmax.cuh"

// The softmax of a tile whose keys are divided by powers of two, nearly always by 1, and whose query rows have scales
// of their own. Scores are of whole keys, and what multiplies values has the power of two in it.
namespace attnops::mla_decode::sm90::converted {

// Probabilities are fp16: they stay below 2^15, and hold 11 bits down to 2^-21 of the reference.
inline constexpr float kHeadroom = 7.f;

// Of a tile's keys in shared memory.
struct Factors {
  const float* of;
  bool some;  // whether any is not 1

  // Scores, or probabilities, times the factors of their keys.
  __device__ void multiply(float (&s)[32]) const {
    if (!some) return;
    const auto* pairs = reinterpret_cast<const float2*>(of) + threadIdx.x % 4;
#pragma unroll
    for (int j = 0; j < 8; ++j) {
      const float2 pair = pairs[4 * j];
#pragma unroll
      for (int h = 0; h < kRowsPerThread; ++h) s[4 * j + 2 * h] *= pair.x, s[4 * j + 2 * h + 1] *= pair.y;
    }
  }
  // The largest of score times scale and the factor of its key, in the base-2 logarithm, of the thread's row h.
  __device__ float weighed_top(const float (&s)[32], float scale, int h) const {
    const auto* pairs = reinterpret_cast<const float2*>(of) + threadIdx.x % 4;
    float top = -INFINITY;
#pragma unroll
    for (int j = 0; j < 8; ++j) {
      const float2 pair = pairs[4 * j];
      top = fmaxf(top, fmaf(s[4 * j + 2 * h], scale, __log2f(pair.x)));
      top = fmaxf(top, fmaf(s[4 * j + 2 * h + 1], scale, __log2f(pair.y)));
    }
    return top;
  }
};

// What needs scores alone: what is left to multiply them by, and the largest of what they weigh.
__device__ inline void listed_tops(const Params& p, uint64_t seen, const Factors& factors,
                                   const float (&row_scale)[kRowsPerThread], float (&s)[32],
                                   float (&scale)[kRowsPerThread], float (&top)[kRowsPerThread]) {
  factors.multiply(s);
#pragma unroll
  for (int h = 0; h < kRowsPerThread; ++h) scale[h] = row_scale[h];
  if (p.softmax_scale <= 0.f) {
#pragma unroll
    for (int i = 0; i < 32; ++i) s[i] *= row_scale[i / 2 % 2];
#pragma unroll
    for (int h = 0; h < kRowsPerThread; ++h) scale[h] = 1.f;
  }
  mask_unlisted(seen, s);
#pragma unroll
  for (int h = 0; h < kRowsPerThread; ++h) {
    top[h] = scale[h] * row_top(s, h);
    if (factors.some) top[h] = factors.weighed_top(s, scale[h], h);
    top[h] = quad_max(top[h]);
  }
}

// Scores become probabilities, and then, behind the sums, what multiplies values.
template <class Halfway>
__device__ inline void listed_exponentials(RowState& rows, const float (&scale)[kRowsPerThread],
                                           const float (&top)[kRowsPerThread], const Factors& factors, float (&s)[32],
                                           float (&factor)[kRowsPerThread], const Halfway& halfway) {
  float reference[kRowsPerThread];
#pragma unroll
  for (int h = 0; h < kRowsPerThread; ++h) {
    const float before = rows.maximum[h];
    const float after = top[h] > before + (kHeadroom + kSlack) ? top[h] - kHeadroom : before;
    factor[h] = rescale_factor(before, after);
    rows.maximum[h] = after;
    reference[h] = after == -INFINITY ? 0.f : after;
  }
#pragma unroll
  for (int h = 0; h < kRowsPerThread; ++h) {
    if (h == 1) halfway();
    float sums[4] = {};
#pragma unroll
    for (int j = 0; j < 8; ++j) {
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        float& x = s[4 * j + 2 * h + e];
        x = exp2_fast(fmaf(x, scale[h], -reference[h]));
        sums[(2 * j + e) % 4] += x;
      }
    }
    rows.sum[h] = rows.sum[h] * factor[h] + ((sums[0] + sums[1]) + (sums[2] + sums[3]));
  }
  factors.multiply(s);
}

}  // namespace attnops::mla_decode::sm90::converted
