#pragma once
#include "sparse_indexer/cpu/logits.h"

// Loops that the compiler makes vectors of. All is internal, so that no function compiled for one processor can be
// taken for another's.
namespace attnops::sparse_indexer::cpu {
namespace {

void head_sums_here(const HeadSums& p) {
  constexpr int kWide = 32;
  static_assert(kSumKeys % kWide == 0);
  for (int first = 0; first < p.keys; first += kWide) {
    float sums[kWide] = {};
    for (int head = 0; head < p.heads; ++head) {
      const float* const dots = p.dots + head * kSumKeys + first;
      const float weight = p.weights[head];
      for (int i = 0; i < kWide; ++i) sums[i] += weight * (dots[i] < 0.f ? 0.f : dots[i]);  // a NaN stays one
    }
    for (int i = 0; i < kWide; ++i) p.sums[first + i] = sums[i];
  }
}

}  // namespace
}  // namespace attnops::sparse_indexer::cpu
