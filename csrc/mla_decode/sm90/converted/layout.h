#pragma once
#include "mla_decode/sm90/layout.h"

// Rows of 656 bytes whose latent part becomes fp16 on its way into shared memory, where it then serves both products of
// the kernel for 16-bit rows. docs/kernels/sparse_mla_sm90.md.
namespace attnops::mla_decode::sm90::converted {

inline constexpr int kScalesAt = 512, kRopeAt = 528;  // in a row, in bytes; latents are before
inline constexpr int kScales = 4;                     // float32, of 128 columns each

// What the kernel of 16-bit rows has there is of no use here.
inline constexpr int kFactors = kRowLists;  // float [2][64], by buffer: powers of two that keys are divided by
inline constexpr int kOdd = kAsked;         // uint8 [2][4], by buffer and warp: whether one of them is not 1
inline constexpr int kQueryScales = kTops;  // float [64]: what scores of a query row are multiplied by
inline constexpr int kQueriesConverted = kHeadMasks;  // a barrier, of both groups

// A power of two by its exponent.
__device__ inline float power_of_two(int exponent) { return __int_as_float((exponent + 127) << 23); }

// Scales that fp16 holds as they are, also multiplied by values, which are up to 448: [2^-16, 2^7), and 0. What a
// product loses below 2^-14 is then 2^-18 of the key's largest at most.
__device__ inline bool fits(float scale) {
  const uint32_t bits = __float_as_uint(scale) << 1;
  return bits - (111u << 24) < 23u << 24 || bits == 0;
}

// Of other keys: the exponent of the largest scale, so far as the rope part stays finite.
__device__ inline int exponent_of(const float4& scale) {
  const float largest = fmaxf(fmaxf(fabsf(scale.x), fabsf(scale.y)), fmaxf(fabsf(scale.z), fabsf(scale.w)));
  return min_of(max_of(static_cast<int>(__float_as_uint(largest) >> 23) - 127, -60), 100);
}

}  // namespace attnops::mla_decode::sm90::converted
