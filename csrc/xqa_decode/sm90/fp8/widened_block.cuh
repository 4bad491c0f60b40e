#pragma once
#include "device/sm80/mma.cuh"
#include "device/sm90/shared_words.cuh"
#include "xqa_decode/sm90/wide_block.cuh"

namespace attnops::xqa_decode::sm90::fp8 {

// The power of two that brings values of up to `top` into the range of fp16, exactly for all but those 2^-28 below it.
__device__ __forceinline__ float range_of_half(float top) {
  const int exponent = static_cast<int>(__float_as_uint(top) >> 23);  // with its bias
  if (top == 0.f || exponent == 255) return 1.f;
  return __uint_as_float(static_cast<uint32_t>(min_of(max_of(14 + 127 - exponent, -100), 100) + 127) << 23);
}

// What sm90::WideBlock is for 16-bit pages, over tiles of e4m3 that have become fp16: rows have scales of their own.
template <class Tr>
struct ScaledBlock : WideBlock<Tr> {
  using Base = WideBlock<Tr>;
  using Base::kScores;

  // `scales`: in shared memory, float [2][kRows]: of raw scores to units of log2, and what is left for the exponent.
  __device__ __forceinline__ void begin(uint32_t scales, uint32_t) {
    const uint32_t own = scales + (threadIdx.x / 32 * 16 + threadIdx.x % 32 / 4) * 4;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      hopper::load_word(Base::score_scale[h], own + h * 32);
      hopper::load_word(Base::scale[h], own + h * 32 + Tr::kRows * 4);
    }
    Base::clear();
  }

  // Where a soft cap, or a scale below zero, comes before the exponent.
  __device__ __forceinline__ void scale_scores(float (&scores)[kScores]) const {
#pragma unroll
    for (int i = 0; i < kScores; ++i) scores[i] *= Base::score_scale[i / 2 & 1];
  }
};

}  // namespace attnops::xqa_decode::sm90::fp8
