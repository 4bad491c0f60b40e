#pragma once
#include "core/types.h"

namespace attnops::compressed_kv::cpu {

// The tokens of an entry.
struct Pooled {
  int dim;  // values of an entry, a multiple of 64
  int count;
  DType dtype;
  int64_t to_scores;          // elements from a token's values to its scores
  const void* const* values;  // [count] rows
  const float* const* ape;    // [count] rows, added to scores
  const float* norm_weight;   // [dim]
  float eps;
};

// x [dim]: per channel, a softmax over the tokens of score + ape weighs their values; then RMS norm. Every form has the
// same bits.
using EntryValues = void (*)(const Pooled& pooled, float* x);

// One per instruction set, each defined by the file that is compiled for it.
void avx2_entry_values(const Pooled& pooled, float* x);
void avx512_entry_values(const Pooled& pooled, float* x);

}  // namespace attnops::compressed_kv::cpu
