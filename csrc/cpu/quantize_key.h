#pragma once
#include "core/index_key.h"
#include "cpu/convert.h"

namespace attnops::cpu {

// `dim` values (64 or 128), which it overwrites, as e4m3; returns their scale. Defines what the GPU computes.
inline float quantize_key(const Quantization& how, float* x, int dim, uint8_t* out) {
  if (how.hadamard) {
    for (int half = 1; half < dim; half *= 2) {
      for (int block = 0; block < dim; block += 2 * half) {
        for (int i = block; i < block + half; ++i) {
          const float a = x[i], b = x[i + half];
          x[i] = a + b;
          x[i + half] = a - b;
        }
      }
    }
    for (int i = 0; i < dim; ++i) x[i] *= hadamard_factor(dim);
  }
  uint32_t largest = 0;
  for (int i = 0; i < dim; ++i) largest = max_of(largest, bits_of(x[i]) & 0x7FFFFFFFu);
  const float scale = key_scale(largest, how.ue8m0);
  for (int i = 0; i < dim; ++i) out[i] = from_float<Float8E4M3>(x[i] / scale).bits;
  return scale;
}

}  // namespace attnops::cpu
