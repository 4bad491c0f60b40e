#pragma once
#include <cstdint>

#include "cpu/tile_ops.h"

// Online softmax of a row block on Vec, which the including file has chosen. Internal linkage: see vec_avx512.h.
namespace attnops::cpu {
namespace {

constexpr float kLog2OfE = 1.4426950408889634f;

// How far, in log2 units, a score may exceed a row's reference before the reference moves: exponentials stay below
// 2^8, far from overflow in float and harmless in bf16, and rescaling the accumulated rows becomes rare. FlashAttention
// 4 describes the idea.
constexpr float kReferenceSlack = 8.f;

// 2^x to 2e-9 (kPrecise) or 3e-6 relative: minimax polynomials on [-1/2, 1/2]. 2^-inf is 0.
template <bool kPrecise>
inline Vec::F exp2_of(Vec::F x) {
  Vec::F whole, f, y;
  Vec::split(x, whole, f);
  if constexpr (kPrecise) {
    y = Vec::fma(f, Vec::set(1.535336195e-04f), Vec::set(1.339887440e-03f));
    y = Vec::fma(f, y, Vec::set(9.618437357e-03f));
    y = Vec::fma(f, y, Vec::set(5.550332471e-02f));
    y = Vec::fma(f, y, Vec::set(2.402264791e-01f));
    y = Vec::fma(f, y, Vec::set(6.931472029e-01f));
  } else {
    y = Vec::fma(f, Vec::set(9.582853092e-03f), Vec::set(5.590642460e-02f));
    y = Vec::fma(f, y, Vec::set(2.402409861e-01f));
    y = Vec::fma(f, y, Vec::set(6.931241934e-01f));
  }
  y = Vec::fma(f, y, Vec::set(1.f));
  return Vec::times_power_of_two(y, whole);
}

// tanh(x) = (1 - e) / (1 + e) with e = exp(-2 |x|): the absolute error is that of one rounding.
inline Vec::F tanh_of(Vec::F x) {
  const Vec::F e = exp2_of<true>(Vec::mul(Vec::abs(x), Vec::set(-2.f * kLog2OfE)));
  const Vec::F one = Vec::set(1.f);
  return Vec::with_sign(Vec::div(Vec::sub(one, e), Vec::add(one, e)), x);
}

inline void scale_row(float* row, int n, float factor) {
  const Vec::F f = Vec::set(factor);
  for (int j = 0; j < n; j += Vec::kWidth) Vec::store(row + j, Vec::mul(Vec::load(row + j), f));
}

// Raises the reference of row `r` to `largest` and rescales what was summed against the old one. Rare, so not inlined.
__attribute__((noinline)) void raise_reference(const SoftmaxTile& t, int r, float largest) {
  const float old = t.row_max[r];
  t.row_max[r] = largest;
  if (old == -__builtin_inff()) return;  // nothing summed yet: all zeros
  float factors[Vec::kWidth];
  Vec::store(factors, exp2_of<true>(Vec::set(old - largest)));
  scale_row(t.row_sum + static_cast<int64_t>(r) * kSumLanes, kSumLanes, factors[0]);
  scale_row(t.out + r * t.ld_out, t.n_out, factors[0]);
}

inline void cap_row(float* row, int n, float scale, float cap) {
  const Vec::F factor = Vec::set(scale / cap);
  for (int j = 0; j < n; j += Vec::kWidth) {
    Vec::store(row + j, Vec::mul(tanh_of(Vec::mul(Vec::load(row + j), factor)), Vec::set(cap * kLog2OfE)));
  }
}

// Store: writes two adjacent vectors of exponentials in the compute type.
template <bool kMasked, class Store>
inline void softmax_row(const SoftmaxTile& t, int r, float scale_log2) {
  constexpr int kWidth = Vec::kWidth;
  const float* scores = t.scores + r * t.ld_scores;
  const uint64_t* visible = kMasked ? t.visible + r * t.ld_visible : nullptr;
  const Vec::F scale = Vec::set(scale_log2), minus_inf = Vec::set(-__builtin_inff());

  Vec::F largest[2] = {minus_inf, minus_inf};
  for (int j = 0; j < t.n; j += 2 * kWidth) {
#pragma GCC unroll 2
    for (int i = 0; i < 2; ++i) {
      const int column = j + i * kWidth;
      Vec::F x = Vec::mul(Vec::load(scores + column), scale);
      if constexpr (kMasked) x = Vec::select(Vec::mask(visible, column), x, minus_inf);
      largest[i] = Vec::max(largest[i], x);
    }
  }
  largest[0] = Vec::max(largest[0], largest[1]);
  if (Vec::any_greater(largest[0], Vec::set(t.row_max[r] + kReferenceSlack))) {
    raise_reference(t, r, Vec::reduce_max(largest[0]));
  }

  const float reference = t.row_max[r] == -__builtin_inff() ? 0.f : t.row_max[r];
  const Vec::F minus_reference = Vec::set(-reference);
  float* sum_lanes = t.row_sum + static_cast<int64_t>(r) * kSumLanes;
  constexpr int kSums = kSumLanes / kWidth;
  Vec::F sums[kSums];
#pragma GCC unroll 2
  for (int i = 0; i < kSums; ++i) sums[i] = Vec::load(sum_lanes + i * kWidth);
  for (int j = 0; j < t.n; j += 2 * kWidth) {
    Vec::F p[2];
#pragma GCC unroll 2
    for (int i = 0; i < 2; ++i) {
      const int column = j + i * kWidth;
      p[i] = exp2_of<Store::kPrecise>(Vec::fma(Vec::load(scores + column), scale, minus_reference));
      if constexpr (kMasked) p[i] = Vec::select(Vec::mask(visible, column), p[i], Vec::zero());
      sums[i % kSums] = Vec::add(sums[i % kSums], p[i]);
    }
    Store::pair(t.probs, r * t.ld_probs + j, p[0], p[1]);
  }
#pragma GCC unroll 2
  for (int i = 0; i < kSums; ++i) Vec::store(sum_lanes + i * kWidth, sums[i]);
}

template <class Store>
void softmax(const SoftmaxTile& t) {
  const bool capped = t.logit_cap > 0.f;
  const float scale_log2 = capped ? 1.f : t.scale * kLog2OfE;
  for (int r = 0; r < t.m; ++r) {
    if (capped) cap_row(t.scores + r * t.ld_scores, t.n, t.scale, t.logit_cap);
    if (t.visible) {
      softmax_row<true, Store>(t, r, scale_log2);
    } else {
      softmax_row<false, Store>(t, r, scale_log2);
    }
  }
}

struct StoreFloat {
  static constexpr bool kPrecise = true;
  static void pair(void* probs, int64_t at, Vec::F a, Vec::F b) {
    Vec::store(static_cast<float*>(probs) + at, a);
    Vec::store(static_cast<float*>(probs) + at + Vec::kWidth, b);
  }
};

}  // namespace
}  // namespace attnops::cpu
