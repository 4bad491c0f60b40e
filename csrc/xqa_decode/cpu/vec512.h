#pragma once
#include <immintrin.h>

#include <cstdint>

#include "xqa_decode/cpu/elements.h"

// AVX-512 (F, BW, DQ, VL) registers of floats, as kernel.h wants them. Everything is local to the including file: see
// vec256.h.
namespace attnops::xqa_decode::cpu {
namespace {

struct Vec {
  using Reg = __m512;
  static constexpr int kLanes = 16;
  static constexpr int kAccumulators = 16;  // of <q, k>: half of the registers, and one register of sums
  static constexpr int kColumns = 4;        // registers of columns of p * v per row

  static Reg zero() { return _mm512_setzero_ps(); }
  static Reg all(float x) { return _mm512_set1_ps(x); }
  static Reg broadcast(const float* p) { return _mm512_set1_ps(*p); }
  static Reg load(const float* p) { return _mm512_loadu_ps(p); }
  static void store(float* p, Reg x) { _mm512_storeu_ps(p, x); }
  static Reg fma(Reg a, Reg b, Reg c) { return _mm512_fmadd_ps(a, b, c); }
  static Reg mul(Reg a, Reg b) { return _mm512_mul_ps(a, b); }
  static Reg add(Reg a, Reg b) { return _mm512_add_ps(a, b); }
  static Reg sub(Reg a, Reg b) { return _mm512_sub_ps(a, b); }
  static Reg div(Reg a, Reg b) { return _mm512_div_ps(a, b); }
  static Reg max(Reg a, Reg b) { return _mm512_max_ps(a, b); }
  static Reg round(Reg x) { return _mm512_roundscale_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
  // x * 2^n for whole n in [-127, 127]; 2^-127 counts as 0, as it does in vec256.h.
  static Reg scale(Reg x, Reg n) {
    return _mm512_maskz_scalef_ps(_mm512_cmp_ps_mask(n, all(-126.5f), _CMP_NLT_UQ), x, n);
  }

  // Lanes whose bit is set keep x, the others become -infinity.
  static Reg keep(Reg x, uint64_t bits) {
    return _mm512_mask_mov_ps(all(-__builtin_inff()), static_cast<__mmask16>(bits), x);
  }

  static float sum(Reg x) { return _mm512_reduce_add_ps(x); }
  static float largest(Reg x) { return _mm512_reduce_max_ps(x); }

  // Lane i of the result is the sum over a[i]: a transposition that adds on its way.
  static Reg sums(const Reg (&a)[16]) {
    Reg quad[4];  // lane-of-128 j of quad[i]: partial sums of a[4 i .. 4 i + 3]
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) {
      const __m512d x =
          _mm512_castps_pd(add(_mm512_unpacklo_ps(a[4 * i], a[4 * i + 1]), _mm512_unpackhi_ps(a[4 * i], a[4 * i + 1])));
      const __m512d y = _mm512_castps_pd(
          add(_mm512_unpacklo_ps(a[4 * i + 2], a[4 * i + 3]), _mm512_unpackhi_ps(a[4 * i + 2], a[4 * i + 3])));
      quad[i] = add(_mm512_castpd_ps(_mm512_unpacklo_pd(x, y)), _mm512_castpd_ps(_mm512_unpackhi_pd(x, y)));
    }
    const Reg low = add_lanes(quad[0], quad[1]), high = add_lanes(quad[2], quad[3]);
    return add_lanes(low, high);
  }

  // Lanes [row * kCount, (row + 1) * kCount) go to scores[row * stride].
  template <int kRows, int kCount>
  static void scatter(float* scores, int stride, Reg x) {
    if constexpr (kCount == 16) {
      _mm512_storeu_ps(scores, x);
    } else if constexpr (kCount == 8) {
      _mm256_storeu_ps(scores, _mm512_castps512_ps256(x));
      _mm256_storeu_ps(scores + stride, _mm512_extractf32x8_ps(x, 1));
    } else {
      _mm_storeu_ps(scores, _mm512_castps512_ps128(x));
      _mm_storeu_ps(scores + stride, _mm512_extractf32x4_ps(x, 1));
      _mm_storeu_ps(scores + 2 * stride, _mm512_extractf32x4_ps(x, 2));
      if constexpr (kRows == 4) _mm_storeu_ps(scores + 3 * stride, _mm512_extractf32x4_ps(x, 3));
    }
  }

  // The first `count` lanes, zeros in the rest; nothing beyond them is read.
  static Reg load_elements(const float* p, int count = 16) { return _mm512_maskz_loadu_ps(mask(count), p); }
  static Reg load_elements(const Half* p, int count = 16) {
    return _mm512_cvtph_ps(_mm256_maskz_loadu_epi16(mask(count), p));
  }
  static Reg load_elements(const BHalf* p, int count = 16) {
    const __m512i wide = _mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(mask(count), p));
    return _mm512_castsi512_ps(_mm512_slli_epi32(wide, 16));
  }

  static void store_elements(float* p, Reg x, int count) { _mm512_mask_storeu_ps(p, mask(count), x); }
  static void store_elements(Half* p, Reg x, int count) {
    _mm256_mask_storeu_epi16(p, mask(count), _mm512_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT));
  }
  static void store_elements(BHalf* p, Reg x, int count) {
    const __m512i bits = _mm512_castps_si512(x);
    const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
    const __m512i even = _mm512_add_epi32(_mm512_add_epi32(bits, _mm512_set1_epi32(0x7FFF)), odd);
    const __mmask16 nan = _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q);
    const __m512i rounded = _mm512_mask_or_epi32(even, nan, bits, _mm512_set1_epi32(0x400000));
    _mm256_mask_storeu_epi16(p, mask(count), _mm512_cvtepi32_epi16(_mm512_srli_epi32(rounded, 16)));
  }

  // Sixteen e4m3 bytes; see vec256.h.
  static Reg load_elements(const E4M3* p, int count = 16) {
    const __m512i x = _mm512_cvtepu8_epi32(_mm_maskz_loadu_epi8(mask(count), p));
    const __m512i magnitude = _mm512_and_si512(x, _mm512_set1_epi32(0x7F));
    const __m512i sign = _mm512_slli_epi32(_mm512_and_si512(x, _mm512_set1_epi32(0x80)), 24);
    __m512i value = _mm512_add_epi32(_mm512_slli_epi32(magnitude, 20), _mm512_set1_epi32(120 << 23));
    const Reg subnormal = mul(_mm512_cvtepi32_ps(magnitude), all(0x1p-9f));
    value = _mm512_mask_mov_epi32(value, _mm512_cmplt_epi32_mask(magnitude, _mm512_set1_epi32(8)),
                                  _mm512_castps_si512(subnormal));
    value = _mm512_mask_mov_epi32(value, _mm512_cmpeq_epi32_mask(magnitude, _mm512_set1_epi32(0x7F)),
                                  _mm512_set1_epi32(0x7FC00000));
    return _mm512_castsi512_ps(_mm512_or_si512(value, sign));
  }

 private:
  static __mmask16 mask(int count) { return static_cast<__mmask16>(count >= 16 ? 0xFFFF : (1 << count) - 1); }
  static Reg add_lanes(Reg a, Reg b) { return add(_mm512_shuffle_f32x4(a, b, 0x88), _mm512_shuffle_f32x4(a, b, 0xDD)); }
};

}  // namespace
}  // namespace attnops::xqa_decode::cpu
