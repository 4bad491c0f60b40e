#pragma once
#include <cmath>

#include "core/types.h"

namespace attnops {

// How two partial softmax results over disjoint keys combine. `lse` is the natural log of the sum of
// exponentials; an empty key set has lse == -inf and is the identity of the merge.
struct MergeWeights {
  float a, b;  // a + b == 1 unless both sides are empty, then a == b == 0
  float lse;
};

ATTNOPS_HOST_DEVICE inline MergeWeights merge_weights(float lse_a, float lse_b) {
  const float lse_max = fmaxf(lse_a, lse_b);
  if (lse_max == -INFINITY) return {0.f, 0.f, -INFINITY};
  const float exp_a = expf(lse_a - lse_max);
  const float exp_b = expf(lse_b - lse_max);
  const float sum = exp_a + exp_b;  // in [1, 2]: cannot overflow, cannot be zero
  return {exp_a / sum, exp_b / sum, lse_max + logf(sum)};
}

// A side of weight zero may hold garbage (an empty split never writes its row), and 0 * NaN is NaN:
// select, do not multiply.
ATTNOPS_HOST_DEVICE inline float weighted(float weight, float value) { return weight > 0.f ? weight * value : 0.f; }

ATTNOPS_HOST_DEVICE inline float merge_value(const MergeWeights& w, float a, float b) {
  return weighted(w.a, a) + weighted(w.b, b);
}

}  // namespace attnops
