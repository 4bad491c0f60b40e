#pragma once

namespace attnops::sparse_indexer::cpu {

inline constexpr int kSumKeys = 128;

// Sums over a token's heads, of their products with some keys.
struct HeadSums {
  const float* dots;     // [heads, kSumKeys]
  const float* weights;  // [heads]
  int heads, keys;       // keys: a multiple of 32
  float* sums;           // [keys]: of weight * max(q . k, 0)
};

// One function per instruction set, each defined by the file that is compiled for it.
void avx2_head_sums(const HeadSums& p);
void avx512_head_sums(const HeadSums& p);

}  // namespace attnops::sparse_indexer::cpu
