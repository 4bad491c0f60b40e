#pragma once
#include "cpu/row_rounding.h"

// Loops that the compiler makes vectors of. All is internal, so that no function compiled for one processor can be
// taken for another's.
namespace attnops::cpu {
namespace {

// A stage adds and subtracts neighbours, and puts sums in front of differences. After all stages each value has met the
// others in the order of quantize_key's butterflies, and stands where they leave it.
template <int kDim>
inline void rotate_values(float* x, float factor) {
  float y[kDim];
  const auto stage = [](const float* __restrict__ from, float* __restrict__ to) {
    for (int i = 0; i < kDim / 2; ++i) {
      const float a = from[2 * i], b = from[2 * i + 1];
      to[i] = a + b;
      to[i + kDim / 2] = a - b;
    }
  };
  for (int half = 1; half < kDim; half *= 4) {
    stage(x, y);
    if (2 * half < kDim) {
      stage(y, x);
    } else {
      for (int i = 0; i < kDim; ++i) x[i] = y[i];
    }
  }
  for (int i = 0; i < kDim; ++i) x[i] *= factor;
}

template <int kDim>
inline uint32_t largest_bits(const float* x) {
  int32_t largest = 0;
  for (int i = 0; i < kDim; ++i) {
    const int32_t magnitude = __builtin_bit_cast(int32_t, x[i]) & 0x7FFFFFFF;
    largest = magnitude > largest ? magnitude : largest;
  }
  return static_cast<uint32_t>(largest);
}

// As from_float<Float8E4M3> in cpu/convert.h.
template <int kDim>
inline void round_values(const float* x, float scale, uint8_t* out) {
  int32_t codes[kDim];
  for (int i = 0; i < kDim; ++i) {
    const int32_t bits = __builtin_bit_cast(int32_t, x[i] / scale), magnitude = bits & 0x7FFFFFFF;
    const uint32_t halfway =
        static_cast<uint32_t>(magnitude) + 0x7FFFF + ((magnitude >> 20) & 1);  // NaN beyond int32_t
    const int32_t normal = static_cast<int32_t>(halfway >> 20) - ((127 - 7) << 3);
    const float aligned = __builtin_bit_cast(float, magnitude) + 0x1p14f;
    const int32_t subnormal = __builtin_bit_cast(int32_t, aligned) & 0xF;
    // Without branches: from 464 on numbers are 448, and a NaN stays one.
    const int32_t is_small = -static_cast<int32_t>(magnitude < __builtin_bit_cast(int32_t, 0x1p-6f));
    const int32_t is_nan = -static_cast<int32_t>(magnitude > 0x7F800000);
    const int32_t finite = normal < 0x7E ? normal : 0x7E;
    const int32_t code = (subnormal & is_small) | (finite & ~is_small) | (0x7F & is_nan);
    codes[i] = ((bits >> 24) & 0x80) | code;
  }
  for (int i = 0; i < kDim; ++i) out[i] = static_cast<uint8_t>(codes[i]);
}

uint32_t rotate_here(float* x, int dim, float factor) {
  if (factor != 0.f) dim == 64 ? rotate_values<64>(x, factor) : rotate_values<128>(x, factor);
  return dim == 64 ? largest_bits<64>(x) : largest_bits<128>(x);
}

void round_here(const float* x, int dim, float scale, uint8_t* out) {
  dim == 64 ? round_values<64>(x, scale, out) : round_values<128>(x, scale, out);
}

}  // namespace
}  // namespace attnops::cpu
