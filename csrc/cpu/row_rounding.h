#pragma once
#include <cstdint>

namespace attnops {
struct Quantization;
}

namespace attnops::cpu {

// The two halves of quantize_key that look at every value, for rows of 64 or 128: the same bits.
struct RowRounding {
  // Multiplies by the Hadamard matrix and `factor`, unless that is 0; returns the largest bits without sign.
  uint32_t (*rotate)(float* x, int dim, float factor);
  // out = x / scale as e4m3.
  void (*round)(const float* x, int dim, float scale, uint8_t* out);
};

// One table per instruction set, each defined by the file that is compiled for it.
extern const RowRounding avx2_row_rounding, avx512_row_rounding;

// What the processor takes, or null: then quantize_key of cpu/quantize_key.h, the definition of right.
const RowRounding* row_rounding();

// `dim` values (64 or 128), which it overwrites, as e4m3; returns their scale.
float quantize_key(const RowRounding* rounding, const Quantization& how, float* x, int dim, uint8_t* out);

}  // namespace attnops::cpu
