#pragma once
#include <cstdint>

#include "cpu/tile_ops.h"

// Rows in and out of the compute type, on Vec, which the including file has chosen. Internal linkage: see
// vec_avx512.h.
namespace attnops::cpu {
namespace {

inline void nothing() {}

// Calls `run` with the dtype as a template argument.
template <class Run>
inline void for_input_dtype(DType dtype, const Run& run) {
  switch (dtype) {
    case DType::kFloat32: return run.template operator()<DType::kFloat32>();
    case DType::kFloat16: return run.template operator()<DType::kFloat16>();
    case DType::kBFloat16: return run.template operator()<DType::kBFloat16>();
    case DType::kFloat8E4M3: return run.template operator()<DType::kFloat8E4M3>();
    default: return;
  }
}

template <DType kFrom, DType kTo>
inline void load_row(void* dst, int64_t at, const void* row, int k, int k_padded, float scale) {
  for (int d = 0; d < k_padded; d += Vec::kWidth) {
    Vec::F x = Vec::zero();
    if (row != nullptr && d < k) x = Vec::mul(Vec::load_as<kFrom>(row, d, k - d), Vec::set(scale));
    Vec::store_as<kTo>(dst, at + d, k_padded - d, x);
  }
}

template <DType kTo>
void load_rows(void* dst, int64_t ld, const void* const* rows, int m, int k, int k_padded, DType dtype, float scale) {
  for_input_dtype(dtype, [=]<DType kFrom>() {
    for (int r = 0; r < m; ++r) load_row<kFrom, kTo>(dst, r * ld, rows[r], k, k_padded, scale);
  });
}

template <DType kType>
void store_row_as(void* row, const float* acc, float factor, int n) {
  const Vec::F f = Vec::set(factor);
  for (int d = 0; d < n; d += Vec::kWidth) {
    const Vec::F x = factor == 0.f ? Vec::zero() : Vec::mul(Vec::load(acc + d), f);
    Vec::store_as<kType>(row, d, n - d, x);
  }
}

inline void store_rows(void* const* rows, const float* acc, int64_t ld, const float* factors, int m, int n,
                       DType dtype) {
  for (int r = 0; r < m; ++r) {
    const float* row = acc + r * ld;
    if (dtype == DType::kFloat32) store_row_as<DType::kFloat32>(rows[r], row, factors[r], n);
    if (dtype == DType::kFloat16) store_row_as<DType::kFloat16>(rows[r], row, factors[r], n);
    if (dtype == DType::kBFloat16) store_row_as<DType::kBFloat16>(rows[r], row, factors[r], n);
  }
}

inline void transpose_floats(float* dst, int64_t ld_dst, const float* src, int64_t ld_src, int m, int n) {
  for (int i = 0; i < m; i += Vec::kWidth) {
    for (int j = 0; j < n; j += Vec::kWidth) {
      Vec::F cells[Vec::kWidth];
#pragma GCC unroll 16
      for (int r = 0; r < Vec::kWidth; ++r) cells[r] = Vec::load(src + (i + r) * ld_src + j);
      Vec::transpose(cells);
#pragma GCC unroll 16
      for (int r = 0; r < Vec::kWidth; ++r) Vec::store(dst + (j + r) * ld_dst + i, cells[r]);
    }
  }
}

// gemm_ahead where nobody asks.
template <auto kGemm>
void gemm_unasked(float* c, int64_t ldc, const void* a, int64_t lda, const void* b, int64_t panel_rows, int m, int n,
                  int k, RowsAhead&) {
  kGemm(c, ldc, a, lda, b, panel_rows, m, n, k, false);
}

}  // namespace
}  // namespace attnops::cpu
