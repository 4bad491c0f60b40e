#pragma once
#include <cstdint>

#include "core/math.h"
#include "core/types.h"

// How a row of values becomes e4m3 with one scale, alike on the CPU and on the GPU: index keys, and latents by blocks.
namespace attnops {

// How index keys and queries are quantized.
struct Quantization {
  bool hadamard;  // multiplied by the Hadamard matrix and dim^-0.5 first
  bool ue8m0;     // scales are powers of two, rounded up
};

ATTNOPS_HOST_DEVICE inline uint32_t bits_of(float x) {
#if defined(__CUDA_ARCH__)
  return __float_as_uint(x);
#else
  return __builtin_bit_cast(uint32_t, x);
#endif
}

ATTNOPS_HOST_DEVICE inline float float_of(uint32_t bits) {
#if defined(__CUDA_ARCH__)
  return __uint_as_float(bits);
#else
  return __builtin_bit_cast(float, bits);
#endif
}

// The scale of a row from the largest of its values' bits without sign. A NaN makes it NaN, so the row's logits are.
ATTNOPS_HOST_DEVICE inline float key_scale(uint32_t largest, bool ue8m0) {
  const float amax = float_of(max_of(largest, bits_of(1e-4f)));
  const float scale = amax / 448.f;
  const uint32_t bits = bits_of(scale);
  if (!ue8m0 || bits >= 0x7F800000u || (bits & 0x7FFFFFu) == 0) return scale;
  return float_of((bits & 0x7F800000u) + 0x800000u);
}

// What a sum and difference tree over `dim` values is multiplied with.
ATTNOPS_HOST_DEVICE inline float hadamard_factor(int dim) { return dim == 64 ? 0.125f : 0.08838834764831845f; }

}  // namespace attnops
