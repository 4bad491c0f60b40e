#pragma once
#include <immintrin.h>

#include <cstdint>

#include "xqa_decode/cpu/elements.h"

// AVX2 + FMA + F16C registers of floats, as kernel.h wants them. Everything is local to the including file: a function
// that the linker could share would carry this file's instructions into files that run on older processors.
namespace attnops::xqa_decode::cpu {
namespace {

struct Vec {
  using Reg = __m256;
  static constexpr int kLanes = 8;
  static constexpr int kAccumulators = 8;  // of <q, k>: half of the registers, and one register of sums
  static constexpr int kColumns = 2;       // registers of columns of p * v per row

  static Reg zero() { return _mm256_setzero_ps(); }
  static Reg all(float x) { return _mm256_set1_ps(x); }
  static Reg broadcast(const float* p) { return _mm256_broadcast_ss(p); }
  static Reg load(const float* p) { return _mm256_loadu_ps(p); }
  static void store(float* p, Reg x) { _mm256_storeu_ps(p, x); }
  static Reg fma(Reg a, Reg b, Reg c) { return _mm256_fmadd_ps(a, b, c); }
  static Reg mul(Reg a, Reg b) { return _mm256_mul_ps(a, b); }
  static Reg add(Reg a, Reg b) { return _mm256_add_ps(a, b); }
  static Reg sub(Reg a, Reg b) { return _mm256_sub_ps(a, b); }
  static Reg div(Reg a, Reg b) { return _mm256_div_ps(a, b); }
  static Reg max(Reg a, Reg b) { return _mm256_max_ps(a, b); }
  static Reg round(Reg x) { return _mm256_round_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }

  // x * 2^n for whole n in [-127, 127]; 2^-127 counts as 0.
  static Reg scale(Reg x, Reg n) {
    const __m256i exponent = _mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127));
    return _mm256_mul_ps(x, _mm256_castsi256_ps(_mm256_slli_epi32(exponent, 23)));
  }

  // Lanes whose bit is set keep x, the others become -infinity.
  static Reg keep(Reg x, uint64_t bits) {
    const __m256i lane_bits = _mm256_setr_epi32(1, 2, 4, 8, 16, 32, 64, 128);
    const __m256i mine = _mm256_and_si256(_mm256_set1_epi32(static_cast<int>(bits & 0xFF)), lane_bits);
    return _mm256_blendv_ps(all(-__builtin_inff()), x, _mm256_castsi256_ps(_mm256_cmpeq_epi32(mine, lane_bits)));
  }

  static float sum(Reg x) {
    const __m128 half = _mm_add_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
    const __m128 pair = _mm_add_ps(half, _mm_movehl_ps(half, half));
    return _mm_cvtss_f32(_mm_add_ss(pair, _mm_movehdup_ps(pair)));
  }
  static float largest(Reg x) {
    const __m128 half = _mm_max_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
    const __m128 pair = _mm_max_ps(half, _mm_movehl_ps(half, half));
    return _mm_cvtss_f32(_mm_max_ss(pair, _mm_movehdup_ps(pair)));
  }

  // Lane i of the result is the sum over a[i].
  static Reg sums(const Reg (&a)[8]) {
    const Reg low = _mm256_hadd_ps(_mm256_hadd_ps(a[0], a[1]), _mm256_hadd_ps(a[2], a[3]));
    const Reg high = _mm256_hadd_ps(_mm256_hadd_ps(a[4], a[5]), _mm256_hadd_ps(a[6], a[7]));
    return _mm256_add_ps(_mm256_permute2f128_ps(low, high, 0x20), _mm256_permute2f128_ps(low, high, 0x31));
  }

  // Lanes [row * kCount, (row + 1) * kCount) go to scores[row * stride].
  template <int kRows, int kCount>
  static void scatter(float* scores, int stride, Reg x) {
    alignas(32) float lanes[8];
    _mm256_store_ps(lanes, x);
    for (int row = 0; row < kRows; ++row) __builtin_memcpy(scores + row * stride, lanes + row * kCount, kCount * 4);
  }

  static Reg load_elements(const float* p) { return _mm256_loadu_ps(p); }
  static Reg load_elements(const Half* p) {
    return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
  }
  static Reg load_elements(const BHalf* p) {
    const __m256i wide = _mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
    return _mm256_castsi256_ps(_mm256_slli_epi32(wide, 16));
  }
  // Never called with a part of a register: head dims are multiples of 8.
  template <class T>
  static Reg load_elements(const T* p, int) {
    return load_elements(p);
  }

  static void store_elements(float* p, Reg x, int) { _mm256_storeu_ps(p, x); }
  static void store_elements(Half* p, Reg x, int) {
    _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm256_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT));
  }
  static void store_elements(BHalf* p, Reg x, int) {
    const __m256i bits = _mm256_castps_si256(x);
    const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
    const __m256i even = _mm256_add_epi32(_mm256_add_epi32(bits, _mm256_set1_epi32(0x7FFF)), odd);
    const __m256i nan = _mm256_castps_si256(_mm256_cmp_ps(x, x, _CMP_UNORD_Q));
    const __m256i rounded = _mm256_blendv_epi8(even, _mm256_or_si256(bits, _mm256_set1_epi32(0x400000)), nan);
    const __m256i words = _mm256_srli_epi32(rounded, 16);
    const __m128i packed = _mm_packus_epi32(_mm256_castsi256_si128(words), _mm256_extracti128_si256(words, 1));
    _mm_storeu_si128(reinterpret_cast<__m128i*>(p), packed);
  }

  // Eight e4m3 bytes. As float16, exponent and fraction mean 2^-8 of the value, subnormals too. That conversion keeps
  // denormals, which a flush-to-zero mode would take from float arithmetic.
  static Reg load_elements(const E4M3* p) {
    const __m128i high = _mm_unpacklo_epi8(_mm_setzero_si128(), _mm_loadl_epi64(reinterpret_cast<const __m128i*>(p)));
    const __m128i half = _mm_and_si128(_mm_srai_epi16(high, 1), _mm_set1_epi16(static_cast<short>(0xBF80)));
    const __m128i all_ones = _mm_set1_epi16(0x3F80);  // of exponent and fraction: NaN
    const __m128i is_nan = _mm_cmpeq_epi16(_mm_and_si128(half, all_ones), all_ones);
    const __m128i value = _mm_or_si128(half, _mm_and_si128(is_nan, _mm_set1_epi16(0x7C00)));
    return _mm256_mul_ps(_mm256_cvtph_ps(value), all(256.f));
  }
};

}  // namespace
}  // namespace attnops::xqa_decode::cpu
