#pragma once
#include <cstdint>

#include "compressed_kv/cpu/entry_values.h"
#include "compressed_kv/params.h"

// Loops that the compiler makes vectors of, and the definition of right where it makes none. Built without fused
// multiplications, so that bits are those of the text. All is internal, so that no function compiled for one processor
// can be taken for another's.
namespace attnops::compressed_kv::cpu {
namespace {

struct Half {
  uint16_t bits;
};
struct BFloat {
  uint16_t bits;
};

inline uint32_t bits_of_float(float x) { return __builtin_bit_cast(uint32_t, x); }
inline float float_of_bits(uint32_t bits) { return __builtin_bit_cast(float, bits); }

// x, or 0 where `keeps` is false. Choices are of bits, and what they choose from is made before: no branches.
inline float kept(float x, bool keeps) { return float_of_bits(bits_of_float(x) & -static_cast<uint32_t>(keeps)); }

inline float widened(float x) { return x; }
inline float widened(BFloat x) { return float_of_bits(static_cast<uint32_t>(x.bits) << 16); }
inline float widened(Half x) {
  const uint32_t magnitude = x.bits & 0x7FFFu, sign = static_cast<uint32_t>(x.bits & 0x8000u) << 16;
  const uint32_t normal = (magnitude << 13) + (112u << 23), special = (magnitude << 13) | 0x7F800000u;
  const uint32_t subnormal = bits_of_float(static_cast<float>(static_cast<int32_t>(magnitude)) * 0x1p-24f);
  const uint32_t is_small = -static_cast<uint32_t>(magnitude < 0x400u);
  const uint32_t is_special = -static_cast<uint32_t>(magnitude >= 0x7C00u);
  return float_of_bits(sign | (subnormal & is_small) | (special & is_special) | (normal & ~(is_small | is_special)));
}

// exp(x) of x <= 0 to 2e-7 where that counts; about 2^-126 and less are 0. NaN stays NaN.
inline float exp_of(float x) {
  constexpr float kMagic = 0x1.8p23f;  // added, it leaves whole numbers
  const float scaled = x * 1.4426950408889634f, shifted = scaled + kMagic, f = scaled - (shifted - kMagic);
  float power = 1.535336195e-04f * f + 1.339887440e-03f;  // 2^f, see exp2_of of cpu/tile/softmax.h
  power = power * f + 9.618437357e-03f;
  power = power * f + 5.550332471e-02f;
  power = power * f + 2.402264791e-01f;
  power = power * f + 6.931472029e-01f;
  power = power * f + 1.f;
  const uint32_t whole = bits_of_float(shifted) - bits_of_float(kMagic);
  const uint32_t magnitude = bits_of_float(scaled) & 0x7FFFFFFFu;
  const bool counts = (magnitude < bits_of_float(126.f)) | (magnitude > 0x7F800000u);
  return kept(power * float_of_bits((whole + 127) << 23), counts);
}

// Not inlined: compilers would forget that the rows lie apart, and make no vectors.
template <typename T>
__attribute__((noinline)) void find_highest(float* __restrict__ highest, const T* __restrict__ scores,
                                            const float* __restrict__ ape, int dim) {
  for (int c = 0; c < dim; ++c) {
    const float score = widened(scores[c]) + ape[c], before = highest[c];
    const float higher = score > before ? score : before;
    const uint32_t is_nan = -static_cast<uint32_t>((bits_of_float(score) & 0x7FFFFFFFu) > 0x7F800000u);
    highest[c] = float_of_bits((bits_of_float(score) & is_nan) | (bits_of_float(higher) & ~is_nan));
  }
}

template <typename T>
__attribute__((noinline)) void add_weighed(float* __restrict__ x, float* __restrict__ total,
                                           const float* __restrict__ highest, const T* __restrict__ values,
                                           const T* __restrict__ scores, const float* __restrict__ ape, int dim) {
  for (int c = 0; c < dim; ++c) {
    const float exponential = exp_of(widened(scores[c]) + ape[c] - highest[c]);
    const float weight = kept(exponential, bits_of_float(highest[c]) != 0xFF800000u);  // -inf: nothing is seen
    total[c] += weight;
    x[c] += kept(weight * widened(values[c]), bits_of_float(weight) != 0);
  }
}

template <typename T>
inline void pool(const Pooled& p, float* __restrict__ x) {
  float highest[kMaxDim], total[kMaxDim];
  for (int c = 0; c < p.dim; ++c) highest[c] = -__builtin_inff();
  for (int c = 0; c < p.dim; ++c) x[c] = total[c] = 0.f;
  for (int t = 0; t < p.count; ++t) {
    find_highest(highest, static_cast<const T*>(p.values[t]) + p.to_scores, p.ape[t], p.dim);
  }
  for (int t = 0; t < p.count; ++t) {
    const T* values = static_cast<const T*>(p.values[t]);
    add_weighed(x, total, highest, values, values + p.to_scores, p.ape[t], p.dim);
  }
  for (int c = 0; c < p.dim; ++c) {
    x[c] = kept(x[c] / total[c], bits_of_float(total[c]) != 0);
  }
}

inline void normalize(const Pooled& p, float* __restrict__ x) {
  constexpr int kSums = 8;
  double sums[kSums] = {}, sum = 0;
  for (int c = 0; c < p.dim; c += kSums) {
    for (int i = 0; i < kSums; ++i) sums[i] += double{x[c + i]} * x[c + i];
  }
  for (int i = 0; i < kSums; ++i) sum += sums[i];
  const float factor = 1.f / __builtin_sqrtf(static_cast<float>(sum / p.dim) + p.eps);
  for (int c = 0; c < p.dim; ++c) x[c] *= factor * p.norm_weight[c];
}

void entry_values_here(const Pooled& p, float* x) {
  if (p.dtype == DType::kFloat32) pool<float>(p, x);
  if (p.dtype == DType::kFloat16) pool<Half>(p, x);
  if (p.dtype == DType::kBFloat16) pool<BFloat>(p, x);
  normalize(p, x);
}

}  // namespace
}  // namespace attnops::compressed_kv::cpu
