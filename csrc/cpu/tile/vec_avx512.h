#pragma once
#include <immintrin.h>

#include <cstdint>

#include "core/types.h"

// Sixteen floats. Everything here and in the headers that build on it has internal linkage: each instruction set's
// source compiles its own copy, and the linker has no say.
namespace attnops::cpu {
namespace {

struct Vec {
  static constexpr int kWidth = 16;
  using F = __m512;
  using Mask = __mmask16;

  static F load(const float* p) { return _mm512_loadu_ps(p); }
  static void store(float* p, F x) { _mm512_storeu_ps(p, x); }
  static F set(float x) { return _mm512_set1_ps(x); }
  static F zero() { return _mm512_setzero_ps(); }
  static F add(F a, F b) { return _mm512_add_ps(a, b); }
  static F sub(F a, F b) { return _mm512_sub_ps(a, b); }
  static F mul(F a, F b) { return _mm512_mul_ps(a, b); }
  static F div(F a, F b) { return _mm512_div_ps(a, b); }
  static F fma(F a, F b, F c) { return _mm512_fmadd_ps(a, b, c); }
  static F max(F a, F b) { return _mm512_max_ps(a, b); }  // b where either is NaN
  static F abs(F a) { return _mm512_abs_ps(a); }
  static F with_sign(F magnitude, F sign) { return _mm512_or_ps(magnitude, _mm512_and_ps(sign, set(-0.f))); }
  static bool any_greater(F a, F b) { return _mm512_cmp_ps_mask(a, b, _CMP_GT_OQ) != 0; }
  static float reduce_max(F a) { return _mm512_reduce_max_ps(a); }

  // x = whole + f with |f| <= 1/2; -inf gives f = 0. And y * 2^whole.
  static void split(F x, F& whole, F& f) {
    whole = _mm512_roundscale_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    f = _mm512_reduce_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  }
  static F times_power_of_two(F y, F whole) { return _mm512_scalef_ps(y, whole); }

  // The nearest bf16, of two the even one.
  static F to_bf16(F x) {
    const __m512i bits = _mm512_castps_si512(x);
    const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
    const __m512i half = _mm512_add_epi32(odd, _mm512_set1_epi32(0x7FFF));
    const __m512i rounded = _mm512_and_si512(_mm512_add_epi32(bits, half), _mm512_set1_epi32(~0xFFFF));
    const __mmask16 is_nan = _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q);
    return _mm512_castsi512_ps(_mm512_mask_blend_epi32(is_nan, rounded, _mm512_set1_epi32(0x7FC00000)));
  }

  // Bits [column, column + kWidth) of a row of bits.
  static Mask mask(const uint64_t* bits, int column) { return static_cast<Mask>(bits[column / 64] >> (column % 64)); }
  static F select(Mask m, F a, F b) { return _mm512_mask_blend_ps(m, b, a); }

  // Elements [at, at + kWidth) of a row, of which `count` exist: 8, or kWidth and more. The others are zeros.
  template <DType kType>
  static F load_as(const void* row, int64_t at, int64_t count) {
    const __mmask16 m = count >= kWidth ? 0xFFFF : 0x00FF;
    if constexpr (kType == DType::kFloat32) return _mm512_maskz_loadu_ps(m, static_cast<const float*>(row) + at);
    if constexpr (kType == DType::kFloat16) {
      return _mm512_cvtph_ps(_mm256_maskz_loadu_epi16(m, static_cast<const uint16_t*>(row) + at));
    }
    if constexpr (kType == DType::kBFloat16) {
      const __m256i bits = _mm256_maskz_loadu_epi16(m, static_cast<const uint16_t*>(row) + at);
      return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(bits), 16));
    }
    if constexpr (kType == DType::kFloat8E4M3) {  // see cpu/convert.h
      const __m512i x = _mm512_cvtepu8_epi32(_mm_maskz_loadu_epi8(m, static_cast<const uint8_t*>(row) + at));
      const __m512i magnitude_bits = _mm512_set1_epi32(0x7F), magnitude = _mm512_and_si512(x, magnitude_bits);
      const __m512i bits = _mm512_add_epi32(_mm512_slli_epi32(magnitude, 20), _mm512_set1_epi32(120 << 23));
      const Mask is_subnormal = _mm512_cmplt_epi32_mask(magnitude, _mm512_set1_epi32(8));
      const F subnormal = mul(_mm512_cvtepi32_ps(magnitude), set(0x1p-9f));
      const F value = select(is_subnormal, subnormal, _mm512_castsi512_ps(bits));
      const Mask is_nan = _mm512_cmpeq_epi32_mask(magnitude, magnitude_bits);
      const F sign = _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_andnot_si512(magnitude_bits, x), 24));
      return _mm512_or_ps(select(is_nan, set(__builtin_nanf("")), value), sign);
    }
  }

  // Stores elements rounded to nearest even: kWidth of them, or 8 when only 8 exist.
  template <DType kType>
  static void store_as(void* row, int64_t at, int64_t count, F x) {
    const __mmask16 m = count >= kWidth ? 0xFFFF : 0x00FF;
    if constexpr (kType == DType::kFloat32) _mm512_mask_storeu_ps(static_cast<float*>(row) + at, m, x);
    if constexpr (kType == DType::kFloat16) {
      _mm256_mask_storeu_epi16(static_cast<uint16_t*>(row) + at, m,
                               _mm512_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
    }
    if constexpr (kType == DType::kBFloat16) {
      const __m512i narrow = _mm512_srli_epi32(_mm512_castps_si512(to_bf16(x)), 16);
      _mm256_mask_storeu_epi16(static_cast<uint16_t*>(row) + at, m, _mm512_cvtepi32_epi16(narrow));
    }
  }

  // r[i][j] <-> r[j][i], as 32-bit cells.
  static void transpose(F (&r)[16]) {
    F t[16];
#pragma GCC unroll 8
    for (int i = 0; i < 16; i += 2) {
      t[i] = _mm512_unpacklo_ps(r[i], r[i + 1]);
      t[i + 1] = _mm512_unpackhi_ps(r[i], r[i + 1]);
    }
#pragma GCC unroll 4
    for (int i = 0; i < 16; i += 4) {
      r[i] = low_pairs(t[i], t[i + 2]);
      r[i + 1] = high_pairs(t[i], t[i + 2]);
      r[i + 2] = low_pairs(t[i + 1], t[i + 3]);
      r[i + 3] = high_pairs(t[i + 1], t[i + 3]);
    }
    // r[4 g + c] now holds, in 128-bit lane l, column 4 l + c of rows 4 g to 4 g + 3.
#pragma GCC unroll 4
    for (int c = 0; c < 4; ++c) {
      const F even01 = _mm512_shuffle_f32x4(r[c], r[4 + c], 0x88), odd01 = _mm512_shuffle_f32x4(r[c], r[4 + c], 0xDD);
      const F even23 = _mm512_shuffle_f32x4(r[8 + c], r[12 + c], 0x88);
      const F odd23 = _mm512_shuffle_f32x4(r[8 + c], r[12 + c], 0xDD);
      t[c] = _mm512_shuffle_f32x4(even01, even23, 0x88);
      t[4 + c] = _mm512_shuffle_f32x4(odd01, odd23, 0x88);
      t[8 + c] = _mm512_shuffle_f32x4(even01, even23, 0xDD);
      t[12 + c] = _mm512_shuffle_f32x4(odd01, odd23, 0xDD);
    }
#pragma GCC unroll 16
    for (int i = 0; i < 16; ++i) r[i] = t[i];
  }

 private:
  static F low_pairs(F a, F b) {
    return _mm512_castpd_ps(_mm512_unpacklo_pd(_mm512_castps_pd(a), _mm512_castps_pd(b)));
  }
  static F high_pairs(F a, F b) {
    return _mm512_castpd_ps(_mm512_unpackhi_pd(_mm512_castps_pd(a), _mm512_castps_pd(b)));
  }
};

}  // namespace
}  // namespace attnops::cpu
