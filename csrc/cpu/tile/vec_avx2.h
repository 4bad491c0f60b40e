#pragma once
#include <immintrin.h>

#include <cstdint>

#include "core/types.h"

// Eight floats, with the interface of vec_avx512.h.
namespace attnops::cpu {
namespace {

struct Vec {
  static constexpr int kWidth = 8;
  using F = __m256;
  using Mask = __m256;

  static F load(const float* p) { return _mm256_loadu_ps(p); }
  static void store(float* p, F x) { _mm256_storeu_ps(p, x); }
  static F set(float x) { return _mm256_set1_ps(x); }
  static F zero() { return _mm256_setzero_ps(); }
  static F add(F a, F b) { return _mm256_add_ps(a, b); }
  static F sub(F a, F b) { return _mm256_sub_ps(a, b); }
  static F mul(F a, F b) { return _mm256_mul_ps(a, b); }
  static F div(F a, F b) { return _mm256_div_ps(a, b); }
  static F fma(F a, F b, F c) { return _mm256_fmadd_ps(a, b, c); }
  static F max(F a, F b) { return _mm256_max_ps(a, b); }  // b where either is NaN
  static F abs(F a) { return _mm256_andnot_ps(set(-0.f), a); }
  static F with_sign(F magnitude, F sign) { return _mm256_or_ps(magnitude, _mm256_and_ps(sign, set(-0.f))); }

  // x = whole + f with |f| <= 1/2, for x up to 127; below -127, 2^whole is zero. And y * 2^whole.
  static void split(F x, F& whole, F& f) {
    const F clamped = max(set(-127.f), x);
    whole = _mm256_round_ps(clamped, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    f = sub(clamped, whole);
  }
  static F times_power_of_two(F y, F whole) {
    const __m256i biased = _mm256_add_epi32(_mm256_cvtps_epi32(whole), _mm256_set1_epi32(127));
    return mul(y, _mm256_castsi256_ps(_mm256_slli_epi32(biased, 23)));
  }
  static bool any_greater(F a, F b) { return _mm256_movemask_ps(_mm256_cmp_ps(a, b, _CMP_GT_OQ)) != 0; }
  static float reduce_max(F a) {
    const __m128 x = _mm_max_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
    const __m128 y = _mm_max_ps(x, _mm_movehl_ps(x, x));
    return _mm_cvtss_f32(_mm_max_ss(y, _mm_movehdup_ps(y)));
  }

  static F to_bf16(F x) {
    const __m256i bits = _mm256_castps_si256(x);
    const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
    const __m256i half = _mm256_add_epi32(odd, _mm256_set1_epi32(0x7FFF));
    const __m256i rounded = _mm256_and_si256(_mm256_add_epi32(bits, half), _mm256_set1_epi32(~0xFFFF));
    return select(_mm256_cmp_ps(x, x, _CMP_UNORD_Q), _mm256_castsi256_ps(_mm256_set1_epi32(0x7FC00000)),
                  _mm256_castsi256_ps(rounded));
  }

  static Mask mask(const uint64_t* bits, int column) {
    const __m256i each = _mm256_setr_epi32(1, 2, 4, 8, 16, 32, 64, 128);
    const __m256i byte = _mm256_set1_epi32(static_cast<int>(bits[column / 64] >> (column % 64)) & 0xFF);
    return _mm256_castsi256_ps(_mm256_cmpeq_epi32(_mm256_and_si256(byte, each), each));
  }
  static F select(Mask m, F a, F b) { return _mm256_blendv_ps(b, a, m); }

  template <DType kType>
  static F load_as(const void* row, int64_t at, int64_t) {
    if constexpr (kType == DType::kFloat32) return _mm256_loadu_ps(static_cast<const float*>(row) + at);
    if constexpr (kType == DType::kFloat16) return _mm256_cvtph_ps(load_128(static_cast<const uint16_t*>(row) + at));
    if constexpr (kType == DType::kBFloat16) {
      const __m256i bits = _mm256_cvtepu16_epi32(load_128(static_cast<const uint16_t*>(row) + at));
      return _mm256_castsi256_ps(_mm256_slli_epi32(bits, 16));
    }
    if constexpr (kType == DType::kFloat8E4M3) {  // see cpu/convert.h
      const __m128i bytes = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(static_cast<const uint8_t*>(row) + at));
      const __m256i x = _mm256_cvtepu8_epi32(bytes), magnitude_bits = _mm256_set1_epi32(0x7F);
      const __m256i magnitude = _mm256_and_si256(x, magnitude_bits);
      const __m256i bits = _mm256_add_epi32(_mm256_slli_epi32(magnitude, 20), _mm256_set1_epi32(120 << 23));
      const __m256 is_subnormal = _mm256_castsi256_ps(_mm256_cmpgt_epi32(_mm256_set1_epi32(8), magnitude));
      const __m256 subnormal = mul(_mm256_cvtepi32_ps(magnitude), set(0x1p-9f));
      const __m256 value = select(is_subnormal, subnormal, _mm256_castsi256_ps(bits));
      const __m256 is_nan = _mm256_castsi256_ps(_mm256_cmpeq_epi32(magnitude, magnitude_bits));
      const __m256 sign = _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_andnot_si256(magnitude_bits, x), 24));
      return _mm256_or_ps(select(is_nan, set(__builtin_nanf("")), value), sign);
    }
  }

  template <DType kType>
  static void store_as(void* row, int64_t at, int64_t, F x) {
    if constexpr (kType == DType::kFloat32) _mm256_storeu_ps(static_cast<float*>(row) + at, x);
    if constexpr (kType == DType::kFloat16) {
      store_128(static_cast<uint16_t*>(row) + at, _mm256_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
    }
    if constexpr (kType == DType::kBFloat16) {
      const __m256i narrow = _mm256_srli_epi32(_mm256_castps_si256(to_bf16(x)), 16);
      store_128(static_cast<uint16_t*>(row) + at,
                _mm_packus_epi32(_mm256_castsi256_si128(narrow), _mm256_extracti128_si256(narrow, 1)));
    }
  }

  static void transpose(F (&r)[8]) {
    F t[8];
#pragma GCC unroll 4
    for (int i = 0; i < 8; i += 2) {
      t[i] = _mm256_unpacklo_ps(r[i], r[i + 1]);
      t[i + 1] = _mm256_unpackhi_ps(r[i], r[i + 1]);
    }
#pragma GCC unroll 2
    for (int i = 0; i < 8; i += 4) {
      r[i] = _mm256_shuffle_ps(t[i], t[i + 2], 0x44);
      r[i + 1] = _mm256_shuffle_ps(t[i], t[i + 2], 0xEE);
      r[i + 2] = _mm256_shuffle_ps(t[i + 1], t[i + 3], 0x44);
      r[i + 3] = _mm256_shuffle_ps(t[i + 1], t[i + 3], 0xEE);
    }
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) {
      t[i] = _mm256_permute2f128_ps(r[i], r[i + 4], 0x20);
      t[i + 4] = _mm256_permute2f128_ps(r[i], r[i + 4], 0x31);
    }
#pragma GCC unroll 8
    for (int i = 0; i < 8; ++i) r[i] = t[i];
  }

 private:
  static __m128i load_128(const uint16_t* p) { return _mm_loadu_si128(reinterpret_cast<const __m128i*>(p)); }
  static void store_128(uint16_t* p, __m128i x) { _mm_storeu_si128(reinterpret_cast<__m128i*>(p), x); }
};

}  // namespace
}  // namespace attnops::cpu
