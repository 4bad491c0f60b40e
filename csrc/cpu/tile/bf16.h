#pragma once
#include <immintrin.h>

#include <cstdint>

#include "cpu/tile/rows.h"
#include "cpu/tile/softmax.h"

// Packing and probabilities with bf16 as the compute type and float accumulation, for AVX512-BF16; AMX shares all but
// the product, because its tiles want the same panels. Internal linkage: see vec_avx512.h.
namespace attnops::cpu {
namespace {

// Two adjacent elements of k: one 32-bit cell of a panel.
constexpr int kPair = 2;

// Elements [at, at + 32) of a row in bf16; those from `count` on, a multiple of 8, are zeros. e4m3 is exact in bf16.
template <DType kType>
inline __m512i load_32_bf16(const void* row, int64_t at, int64_t count) {
  if constexpr (kType == DType::kFloat32) {
    const Vec::F low = Vec::load_as<kType>(row, at, count);
    const bool has_more = count > Vec::kWidth;
    const Vec::F high = has_more ? Vec::load_as<kType>(row, at + Vec::kWidth, count - Vec::kWidth) : Vec::zero();
    return (__m512i)_mm512_cvtne2ps_pbh(high, low);
  }
  const __mmask32 m = count >= 32 ? 0xFFFFFFFFu : (1u << count) - 1;
  if constexpr (kType == DType::kBFloat16) {
    return _mm512_maskz_loadu_epi16(m, static_cast<const uint16_t*>(row) + at);
  } else if constexpr (kType == DType::kFloat8E4M3) {
    const __m256i bytes = _mm256_maskz_loadu_epi8(m, static_cast<const uint8_t*>(row) + at);
    const __m512i x = _mm512_cvtepu8_epi16(bytes);
    const __m512i magnitude = _mm512_and_si512(x, _mm512_set1_epi16(0x7F));
    // Normal numbers: the four exponent bits are biased by 7, bf16's by 127. Subnormals j * 2^-9 come from a table.
    const __m512i normal = _mm512_add_epi16(_mm512_slli_epi16(magnitude, 4), _mm512_set1_epi16((127 - 7) << 7));
    const __m512i subnormals =
        _mm512_castsi128_si512(_mm_setr_epi16(0, 0x3B00, 0x3B80, 0x3BC0, 0x3C00, 0x3C20, 0x3C40, 0x3C60));
    const __mmask32 is_small = _mm512_cmplt_epu16_mask(magnitude, _mm512_set1_epi16(8));
    const __mmask32 is_nan = _mm512_cmpeq_epi16_mask(magnitude, _mm512_set1_epi16(0x7F));
    __m512i value = _mm512_mask_permutexvar_epi16(normal, is_small, magnitude, subnormals);
    value = _mm512_mask_mov_epi16(value, is_nan, _mm512_set1_epi16(0x7FC0));
    const __m512i sign = _mm512_slli_epi16(_mm512_andnot_si512(_mm512_set1_epi16(0x7F), x), 8);
    return _mm512_or_si512(value, sign);
  }
}

inline __m512i scaled_bf16(__m512i x, Vec::F scale) {
  const Vec::F low = _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm512_castsi512_si256(x)), 16));
  const Vec::F high =
      _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm512_extracti64x4_epi64(x, 1)), 16));
  return (__m512i)_mm512_cvtne2ps_pbh(Vec::mul(high, scale), Vec::mul(low, scale));
}

template <DType kFrom>
inline __m512i load_32_scaled(const void* row, int64_t at, int64_t count, float scale) {
  if constexpr (kFrom == DType::kBFloat16 || kFrom == DType::kFloat8E4M3) {
    const __m512i x = load_32_bf16<kFrom>(row, at, count);
    return scale == 1.f ? x : scaled_bf16(x, Vec::set(scale));
  } else {
    const Vec::F low = Vec::load_as<kFrom>(row, at, count);
    const Vec::F high =
        count > Vec::kWidth ? Vec::load_as<kFrom>(row, at + Vec::kWidth, count - Vec::kWidth) : Vec::zero();
    return (__m512i)_mm512_cvtne2ps_pbh(Vec::mul(high, Vec::set(scale)), Vec::mul(low, Vec::set(scale)));
  }
}

void load_rows_as_bf16(void* dst, int64_t ld, const void* const* rows, int m, int k, int k_padded, DType dtype,
                       float scale) {
  for_input_dtype(dtype, [=]<DType kFrom>() {
    for (int r = 0; r < m; ++r) {
      uint16_t* to = static_cast<uint16_t*>(dst) + r * ld;
      for (int d = 0; d < k_padded; d += 32) {
        const bool exists = rows[r] != nullptr && d < k;
        const __m512i x = exists ? load_32_scaled<kFrom>(rows[r], d, k - d, scale) : _mm512_setzero_si512();
        _mm512_mask_storeu_epi16(to + d, k_padded - d >= 32 ? 0xFFFFFFFFu : (1u << (k_padded - d)) - 1, x);
      }
    }
  });
}

void split_into_bf16(void* high, void* rest, const float* src, const float* factors, int m, int n) {
  uint16_t *to_high = static_cast<uint16_t*>(high), *to_rest = static_cast<uint16_t*>(rest);
  for (int r = 0; r < m; ++r) {
    for (int i = 0; i < n; i += 2 * Vec::kWidth) {
      const int64_t at = static_cast<int64_t>(r) * n + i;
      Vec::F x[2];
#pragma GCC unroll 2
      for (int j = 0; j < 2; ++j) {
        x[j] = Vec::load(src + at + j * Vec::kWidth);
        if (factors != nullptr) x[j] = Vec::mul(x[j], Vec::load(factors + i + j * Vec::kWidth));
      }
      _mm512_storeu_si512(to_high + at, (__m512i)_mm512_cvtne2ps_pbh(x[1], x[0]));
#pragma GCC unroll 2
      for (int j = 0; j < 2; ++j) {
        x[j] = Vec::sub(x[j], Vec::load_as<DType::kBFloat16>(to_high, at + j * Vec::kWidth, Vec::kWidth));
      }
      _mm512_storeu_si512(to_rest + at, (__m512i)_mm512_cvtne2ps_pbh(x[1], x[0]));
    }
  }
}

// Sixteen keys by 32 elements are a 16 x 16 matrix of pairs: transposed, they are 16 rows of a panel.
template <DType kType>
void pack_keys_from(uint16_t* dst, const void* const* rows, int n, int k, int k_padded) {
  for (int first = 0; first < n; first += kPanel) {
    uint16_t* panel = dst + static_cast<int64_t>(first) * k_padded;
    for (int d = 0; d < k_padded; d += 32) {
      Vec::F cells[16];
#pragma GCC unroll 16
      for (int i = 0; i < 16; ++i) {
        const void* row = rows[first + i];
        const __m512i x = row && d < k ? load_32_bf16<kType>(row, d, k - d) : _mm512_setzero_si512();
        cells[i] = _mm512_castsi512_ps(x);
      }
      Vec::transpose(cells);
      const int count = k_padded - d < 32 ? (k_padded - d) / kPair : 16;
      for (int i = 0; i < count; ++i) _mm512_storeu_ps(panel + (d + kPair * i) * kPanel, cells[i]);
    }
  }
}

void pack_keys_as_bf16(void* dst, const void* const* rows, int n, int k, int k_padded, DType dtype) {
  uint16_t* panels = static_cast<uint16_t*>(dst);
  if (dtype == DType::kFloat32) pack_keys_from<DType::kFloat32>(panels, rows, n, k, k_padded);
  if (dtype == DType::kBFloat16) pack_keys_from<DType::kBFloat16>(panels, rows, n, k, k_padded);
  if (dtype == DType::kFloat8E4M3) pack_keys_from<DType::kFloat8E4M3>(panels, rows, n, k, k_padded);
}

// Of two rows of 32 elements, element by element: the first 16 of both, and the others.
struct Interleave {
  __m512i low, high;

  Interleave() {
    alignas(64) uint16_t of[2][32];
    for (int i = 0; i < 32; ++i) {
      of[0][i] = static_cast<uint16_t>(i / 2 + (i % 2) * 32);
      of[1][i] = static_cast<uint16_t>(16 + i / 2 + (i % 2) * 32);
    }
    low = _mm512_load_si512(of[0]);
    high = _mm512_load_si512(of[1]);
  }
};

// Two value rows are interleaved element by element.
template <DType kType>
void pack_values_from(uint16_t* dst, const void* const* rows, int n, int d_values, int d_padded) {
  const Interleave interleave;
  const int64_t panel_size = static_cast<int64_t>(n) * kPanel;
  // Panel by panel: panels lie a power of two apart, and a row's cells in all of them would share a cache set.
  for (int d = 0; d < d_padded; d += 32) {
    for (int j = 0; j < n; j += kPair) {
      __m512i x[kPair];
      for (int i = 0; i < kPair; ++i) {
        const bool exists = rows[j + i] != nullptr && d < d_values;
        x[i] = exists ? load_32_bf16<kType>(rows[j + i], d, d_values - d) : _mm512_setzero_si512();
      }
      uint16_t* cell = dst + d / kPanel * panel_size + j * kPanel;
      _mm512_storeu_si512(cell, _mm512_permutex2var_epi16(x[0], interleave.low, x[1]));
      if (d + kPanel < d_padded) {
        _mm512_storeu_si512(cell + panel_size, _mm512_permutex2var_epi16(x[0], interleave.high, x[1]));
      }
    }
  }
}

void pack_values_as_bf16(void* dst, const void* const* rows, int n, int d, int d_padded, DType dtype) {
  uint16_t* panels = static_cast<uint16_t*>(dst);
  if (dtype == DType::kFloat32) pack_values_from<DType::kFloat32>(panels, rows, n, d, d_padded);
  if (dtype == DType::kBFloat16) pack_values_from<DType::kBFloat16>(panels, rows, n, d, d_padded);
  if (dtype == DType::kFloat8E4M3) pack_values_from<DType::kFloat8E4M3>(panels, rows, n, d, d_padded);
}

struct StoreBf16 {
  static constexpr bool kPrecise = false;
  static void pair(void* probs, int64_t at, Vec::F a, Vec::F b) {
    _mm512_storeu_si512(static_cast<uint16_t*>(probs) + at, (__m512i)_mm512_cvtne2ps_pbh(b, a));
  }
};

}  // namespace
}  // namespace attnops::cpu
