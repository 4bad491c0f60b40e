#pragma once
#include <cstdint>

#include "cpu/tile/rows.h"
#include "cpu/tile_ops.h"

// Packing and products with float as the compute type, on Vec, which the including file has chosen.
// Internal linkage: see vec_avx512.h.
namespace attnops::cpu {
namespace {

constexpr int kVecsPerPanel = kPanel / Vec::kWidth;

template <DType kType>
void pack_keys_as(float* dst, const void* const* rows, int n, int k, int k_padded) {
  constexpr int kWidth = Vec::kWidth;
  for (int first = 0; first < n; first += kWidth) {
    float* panel = dst + static_cast<int64_t>(first / kPanel) * k_padded * kPanel + first % kPanel;
    for (int d = 0; d < k_padded; d += kWidth) {
      Vec::F cells[kWidth];
#pragma GCC unroll 16
      for (int i = 0; i < kWidth; ++i) {
        cells[i] = rows[first + i] && d < k ? Vec::load_as<kType>(rows[first + i], d, k - d) : Vec::zero();
      }
      Vec::transpose(cells);
      const int count = k_padded - d < kWidth ? k_padded - d : kWidth;
      for (int i = 0; i < count; ++i) Vec::store(panel + (d + i) * kPanel, cells[i]);
    }
  }
}

void pack_keys_as_floats(void* dst, const void* const* rows, int n, int k, int k_padded, DType dtype) {
  for_input_dtype(dtype, [=]<DType kType>() { pack_keys_as<kType>(static_cast<float*>(dst), rows, n, k, k_padded); });
}

template <DType kType>
void pack_values_as(float* dst, const void* const* rows, int n, int d_values, int d_padded) {
  for (int d = 0; d < d_padded; d += Vec::kWidth) {  // panel by panel: see pack_values_from in bf16.h
    for (int j = 0; j < n; ++j) {
      float* cell = dst + (static_cast<int64_t>(d / kPanel) * n + j) * kPanel + d % kPanel;
      const bool exists = rows[j] != nullptr && d < d_values;
      Vec::store(cell, exists ? Vec::load_as<kType>(rows[j], d, d_values - d) : Vec::zero());
    }
  }
}

void pack_values_as_floats(void* dst, const void* const* rows, int n, int d, int d_padded, DType dtype) {
  for_input_dtype(dtype, [=]<DType kType>() { pack_values_as<kType>(static_cast<float*>(dst), rows, n, d, d_padded); });
}

// kRows rows of c by kPanels panels, all of it in registers.
template <int kRows, int kPanels>
inline void gemm_block(float* c, int64_t ldc, const float* a, int64_t lda, const float* b, int64_t panel_size, int k,
                       bool accumulate) {
  constexpr int kVecs = kPanels * kVecsPerPanel;
  Vec::F acc[kRows][kVecs];
#pragma GCC unroll 16
  for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 4
    for (int v = 0; v < kVecs; ++v) acc[r][v] = accumulate ? Vec::load(c + r * ldc + v * Vec::kWidth) : Vec::zero();
  }
  for (int i = 0; i < k; ++i) {
    Vec::F column[kVecs];
#pragma GCC unroll 4
    for (int v = 0; v < kVecs; ++v) {
      const float* panel = b + v / kVecsPerPanel * panel_size;
      column[v] = Vec::load(panel + i * kPanel + v % kVecsPerPanel * Vec::kWidth);
    }
#pragma GCC unroll 16
    for (int r = 0; r < kRows; ++r) {
      const Vec::F x = Vec::set(a[r * lda + i]);
#pragma GCC unroll 4
      for (int v = 0; v < kVecs; ++v) acc[r][v] = Vec::fma(x, column[v], acc[r][v]);
    }
  }
#pragma GCC unroll 16
  for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 4
    for (int v = 0; v < kVecs; ++v) Vec::store(c + r * ldc + v * Vec::kWidth, acc[r][v]);
  }
}

// The last m < kRows rows, with the same order of additions as every other block.
template <int kRows, int kPanels>
inline void gemm_tail(float* c, int64_t ldc, const float* a, int64_t lda, const float* b, int64_t panel_size, int m,
                      int k, bool accumulate) {
  if constexpr (kRows > 1) {
    if (m == kRows - 1) return gemm_block<kRows - 1, kPanels>(c, ldc, a, lda, b, panel_size, k, accumulate);
    gemm_tail<kRows - 1, kPanels>(c, ldc, a, lda, b, panel_size, m, k, accumulate);
  }
}

template <int kRows, int kPanels>
inline void gemm_column(float* c, int64_t ldc, const float* a, int64_t lda, const float* b, int64_t panel_size, int m,
                        int k, bool accumulate) {
  int r = 0;
  for (; r + kRows <= m; r += kRows) {
    gemm_block<kRows, kPanels>(c + r * ldc, ldc, a + r * lda, lda, b, panel_size, k, accumulate);
  }
  if (r < m) gemm_tail<kRows, kPanels>(c + r * ldc, ldc, a + r * lda, lda, b, panel_size, m - r, k, accumulate);
}

// kRows x kPanels of accumulators fill the registers that remain beside one row of b and one broadcast.
template <int kRows, int kPanels>
void gemm_floats(float* c, int64_t ldc, const void* a, int64_t lda, const void* b, int64_t panel_rows, int m, int n,
                 int k, bool accumulate) {
  const int64_t panel_size = panel_rows * kPanel;
  const float* rows = static_cast<const float*>(a);
  const float* panels = static_cast<const float*>(b);
  int j = 0;
  for (; j + kPanels * kPanel <= n; j += kPanels * kPanel) {
    gemm_column<kRows, kPanels>(c + j, ldc, rows, lda, panels + j / kPanel * panel_size, panel_size, m, k, accumulate);
  }
  for (; j < n; j += kPanel) {
    gemm_column<kRows, 1>(c + j, ldc, rows, lda, panels + j / kPanel * panel_size, panel_size, m, k, accumulate);
  }
}

// c += a b, kRows rows of c by kVecs vectors of columns; b's rows lie wherever they lie.
template <int kRows, int kVecs>
inline void gemm_rows_block(float* c, int64_t ldc, const float* a, int64_t lda, const void* const* rows, int at, int k,
                            RowsAhead& ahead) {
  Vec::F acc[kRows][kVecs];
#pragma GCC unroll 16
  for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 4
    for (int v = 0; v < kVecs; ++v) acc[r][v] = Vec::load(c + r * ldc + v * Vec::kWidth);
  }
  for (int i = 0; i < k; ++i) {
    ahead.ask();
    const float* row = static_cast<const float*>(rows[i]) + at;
    Vec::F cells[kVecs];
#pragma GCC unroll 4
    for (int v = 0; v < kVecs; ++v) cells[v] = Vec::load(row + v * Vec::kWidth);
#pragma GCC unroll 16
    for (int r = 0; r < kRows; ++r) {
      const Vec::F x = Vec::set(a[r * lda + i]);
#pragma GCC unroll 4
      for (int v = 0; v < kVecs; ++v) acc[r][v] = Vec::fma(x, cells[v], acc[r][v]);
    }
  }
#pragma GCC unroll 16
  for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 4
    for (int v = 0; v < kVecs; ++v) Vec::store(c + r * ldc + v * Vec::kWidth, acc[r][v]);
  }
}

// Columns outside: what rows have of them stays near for all blocks of c.
template <int kRows, int kVecs>
void gemm_rows_floats(float* c, int64_t ldc, const void* a, int64_t lda, const void* const* rows, int m, int n, int k,
                      RowsAhead& ahead) {
  static_assert(kRowMultiple % kRows == 0 && kKeyMultiple % (kVecs * Vec::kWidth) == 0);
  const float* probs = static_cast<const float*>(a);
  for (int j = 0; j < n; j += kVecs * Vec::kWidth) {
    for (int r = 0; r < m; r += kRows) {
      gemm_rows_block<kRows, kVecs>(c + r * ldc + j, ldc, probs + r * lda, lda, rows, j, k, ahead);
    }
  }
}

}  // namespace
}  // namespace attnops::cpu
