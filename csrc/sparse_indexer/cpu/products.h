#pragma once
#include "sparse_indexer/cpu/logits.h"

// Loops that the compiler makes vectors of, 16 heads wide. All is internal, so that no function compiled for one
// processor can be taken for another's.
namespace attnops::sparse_indexer::cpu {
namespace {

void products_here(const HeadProducts& p) {
  constexpr int kWide = 16;
  for (int i = 0; i < kKeysAtOnce; ++i) p.sums[i] = 0.f;
  for (int first = 0; first < p.heads; first += kWide) {
    float dots[kKeysAtOnce][kWide] = {};
    for (int d = 0; d < p.dim; ++d) {
      const float* const q = p.q + d * p.heads + first;
      for (int i = 0; i < kKeysAtOnce; ++i) {
        const float key = p.keys[i * p.dim + d];
        for (int h = 0; h < kWide; ++h) dots[i][h] += key * q[h];
      }
    }
    for (int i = 0; i < kKeysAtOnce; ++i) {
      for (int h = 0; h < kWide; ++h) {
        const float dot = dots[i][h];
        p.sums[i] += p.weights[first + h] * (dot < 0.f ? 0.f : dot);  // a NaN stays one
      }
    }
  }
}

}  // namespace
}  // namespace attnops::sparse_indexer::cpu
