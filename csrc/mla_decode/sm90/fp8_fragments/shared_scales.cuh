#pragma once
#include <cuda_fp16.h>

#include <cmath>
#include <cstdint>

#include "core/math.h"

namespace attnops::mla_decode::sm90::fp8_fragments {

__device__ inline uint32_t multiply_halves(uint32_t a, uint32_t b) {
  const __half2 x = __hmul2(reinterpret_cast<const __half2&>(a), reinterpret_cast<const __half2&>(b));
  return reinterpret_cast<const uint32_t&>(x);
}

// The scales of a row of 584 bytes: seven exponents of powers of two, biased by 127. 255 is a NaN.
class SharedScales {
 public:
  static constexpr int kBias = 127;

  __device__ explicit SharedScales(uint2 bytes) : low_(bytes.x), high_(bytes.y & 0xffffffu) {
    uint32_t top = __vmaxu4(low_, high_);
    top = __vmaxu4(top, top >> 16);
    largest_ = static_cast<int>(max(top & 255, top >> 8 & 255));
  }

  __device__ int exponent(int block) const {
    return static_cast<int>((block < 4 ? low_ : high_) >> block % 4 * 8 & 255);
  }

  __device__ float largest_scale() const { return largest_ == 255 ? NAN : __uint_as_float(largest_ << 23); }

  // Twice in fp16: the scale of a block beside the largest.
  __device__ uint32_t ratio(int block) const { return quotient(exponent(block), largest_); }

  // 2^(exponent - from), at most 2^(127 + 1): infinity beyond fp16, 0 below it.
  __device__ static uint32_t quotient(int exponent, int from) {
    const float ratio = __uint_as_float(max(exponent - from + kBias, 0) << 23);
    const __half2 twice = __float2half2_rn(ratio);
    return reinterpret_cast<const uint32_t&>(twice);
  }

  // Of the power that the row's values are divided by: e4m3 do not exceed 448 then, and the rope part, the bits of
  // whose largest values all lanes of a quad have parts of, stays below 2^15. In the range that the kernel minds.
  __device__ int exponent_of_values(uint32_t rope) const {
    rope = __vmaxu2(rope, __shfl_xor_sync(0xffffffffu, rope, 1));
    rope = __vmaxu2(rope, __shfl_xor_sync(0xffffffffu, rope, 2));
    constexpr int kTop = 14, kLeast = kBias - 60, kMost = kBias + 100;
    const int of_rope = static_cast<int>(max(rope & 0xffffu, rope >> 16) >> 7) - kTop;
    return min_of(max_of(max_of(largest_, of_rope), kLeast), kMost);
  }

 private:
  uint32_t low_, high_;
  int largest_;
};

}  // namespace attnops::mla_decode::sm90::fp8_fragments
