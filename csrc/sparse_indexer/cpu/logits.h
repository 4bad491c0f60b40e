#pragma once
#include <cstdint>

namespace attnops::sparse_indexer::cpu {

inline constexpr int kKeysAtOnce = 8;

// Products of some keys with the heads of a token, all as floats.
struct HeadProducts {
  const float* q;        // [dim, heads]: heads side by side
  const float* weights;  // [heads]
  int heads, dim;        // heads: a multiple of 16
  const float* keys;     // [kKeysAtOnce, dim]
  float* sums;           // [kKeysAtOnce]: of weight * max(q . k, 0)
};

// One function per instruction set, each defined by the file that is compiled for it.
void scalar_products(const HeadProducts& p);
void avx2_products(const HeadProducts& p);
void avx512_products(const HeadProducts& p);

}  // namespace attnops::sparse_indexer::cpu
