#pragma once
#include <cstdint>

namespace attnops::sparse_indexer::cpu {

// The two halves of attnops::cpu::quantize_key that look at every value, for rows of 64 or 128: the same bits.
struct RowRounding {
  // Multiplies by the Hadamard matrix and `factor`, unless that is 0; returns the largest bits without sign.
  uint32_t (*rotate)(float* x, int dim, float factor);
  // out = x / scale as e4m3.
  void (*round)(const float* x, int dim, float scale, uint8_t* out);
};

// One table per instruction set, each defined by the file that is compiled for it.
extern const RowRounding avx2_row_rounding, avx512_row_rounding;

}  // namespace attnops::sparse_indexer::cpu
