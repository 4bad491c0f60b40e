#include "cpu/tile/vec_avx512.h"
// Vec comes first.
#include "cpu/tile/bf16.h"

namespace attnops::cpu {
namespace {

inline __m512 dot_pairs(__m512 acc, __m512i a, __m512i b) { return _mm512_dpbf16_ps(acc, (__m512bh)a, (__m512bh)b); }

inline __m512i broadcast_pair(const uint16_t* p) {
  int pair;
  __builtin_memcpy(&pair, p, sizeof(pair));
  return _mm512_set1_epi32(pair);
}

// kRows rows of c by kPanels panels in registers, two elements of k a step; `ask` runs at each.
template <int kRows, int kPanels, class Ask>
inline void bf16_block(float* c, int64_t ldc, const uint16_t* a, int64_t lda, const uint16_t* b, int64_t panel_size,
                       int k, bool accumulate, const Ask& ask) {
  __m512 acc[kRows][kPanels];
#pragma GCC unroll 16
  for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 4
    for (int p = 0; p < kPanels; ++p) {
      acc[r][p] = accumulate ? _mm512_loadu_ps(c + r * ldc + p * kPanel) : _mm512_setzero_ps();
    }
  }
  for (int i = 0; i < k; i += kPair) {
    ask();
    __m512i cells[kPanels];
#pragma GCC unroll 4
    for (int p = 0; p < kPanels; ++p) cells[p] = _mm512_loadu_si512(b + p * panel_size + i * kPanel);
#pragma GCC unroll 16
    for (int r = 0; r < kRows; ++r) {
      const __m512i x = broadcast_pair(a + r * lda + i);
#pragma GCC unroll 4
      for (int p = 0; p < kPanels; ++p) acc[r][p] = dot_pairs(acc[r][p], x, cells[p]);
    }
  }
#pragma GCC unroll 16
  for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 4
    for (int p = 0; p < kPanels; ++p) _mm512_storeu_ps(c + r * ldc + p * kPanel, acc[r][p]);
  }
}

template <int kRows, int kPanels, class Ask>
inline void bf16_tail(float* c, int64_t ldc, const uint16_t* a, int64_t lda, const uint16_t* b, int64_t panel_size,
                      int m, int k, bool accumulate, const Ask& ask) {
  if constexpr (kRows > 1) {
    if (m == kRows - 1) return bf16_block<kRows - 1, kPanels>(c, ldc, a, lda, b, panel_size, k, accumulate, ask);
    bf16_tail<kRows - 1, kPanels>(c, ldc, a, lda, b, panel_size, m, k, accumulate, ask);
  }
}

template <int kRows, int kPanels, class Ask>
inline void bf16_column(float* c, int64_t ldc, const uint16_t* a, int64_t lda, const uint16_t* b, int64_t panel_size,
                        int m, int k, bool accumulate, const Ask& ask) {
  int r = 0;
  for (; r + kRows <= m; r += kRows) {
    bf16_block<kRows, kPanels>(c + r * ldc, ldc, a + r * lda, lda, b, panel_size, k, accumulate, ask);
  }
  if (r < m) bf16_tail<kRows, kPanels>(c + r * ldc, ldc, a + r * lda, lda, b, panel_size, m - r, k, accumulate, ask);
}

// kRows rows of c by 32 columns from `at` on, whose rows of b are interleaved on the way.
template <int kRows>
inline void bf16_rows_block(float* c, int64_t ldc, const uint16_t* a, int64_t lda, const void* const* rows, int at,
                            int k, const Interleave& interleave, RowsAhead& ahead) {
  __m512 acc[kRows][2];
#pragma GCC unroll 16
  for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 2
    for (int p = 0; p < 2; ++p) acc[r][p] = _mm512_loadu_ps(c + r * ldc + p * kPanel);
  }
  for (int i = 0; i < k; i += kPair) {
    ahead.ask();
    const __m512i first = _mm512_loadu_si512(static_cast<const uint16_t*>(rows[i]) + at);
    const __m512i second = _mm512_loadu_si512(static_cast<const uint16_t*>(rows[i + 1]) + at);
    const __m512i low = _mm512_permutex2var_epi16(first, interleave.low, second);
    const __m512i high = _mm512_permutex2var_epi16(first, interleave.high, second);
#pragma GCC unroll 16
    for (int r = 0; r < kRows; ++r) {
      const __m512i x = broadcast_pair(a + r * lda + i);
      acc[r][0] = dot_pairs(acc[r][0], x, low);
      acc[r][1] = dot_pairs(acc[r][1], x, high);
    }
  }
#pragma GCC unroll 16
  for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 2
    for (int p = 0; p < 2; ++p) _mm512_storeu_ps(c + r * ldc + p * kPanel, acc[r][p]);
  }
}

// Columns outside: what rows have of them stays near for all blocks of c.
void gemm_rows_bf16(float* c, int64_t ldc, const void* a, int64_t lda, const void* const* rows, int m, int n, int k,
                    RowsAhead& ahead) {
  constexpr int kRows = 8;
  static_assert(kRowMultiple % kRows == 0);
  const auto* probs = static_cast<const uint16_t*>(a);
  const Interleave interleave;
  for (int j = 0; j < n; j += 2 * kPanel) {
    for (int r = 0; r < m; r += kRows) {
      bf16_rows_block<kRows>(c + r * ldc + j, ldc, probs + r * lda, lda, rows, j, k, interleave, ahead);
    }
  }
}

template <class Ask>
inline void gemm_bf16_asking(float* c, int64_t ldc, const void* a, int64_t lda, const void* b, int64_t panel_rows,
                             int m, int n, int k, bool accumulate, const Ask& ask) {
  constexpr int kRows = 6, kPanels = 4;  // 24 accumulators, 4 cells of b and one broadcast: 29 of 32 registers
  const int64_t panel_size = panel_rows * kPanel;
  const uint16_t* rows = static_cast<const uint16_t*>(a);
  const uint16_t* panels = static_cast<const uint16_t*>(b);
  const auto panel = [&](int j) { return panels + j / kPanel * panel_size; };
  int j = 0;
  for (; j + kPanels * kPanel <= n; j += kPanels * kPanel) {
    bf16_column<kRows, kPanels>(c + j, ldc, rows, lda, panel(j), panel_size, m, k, accumulate, ask);
  }
  // Fewer panels, more rows: as many accumulators as products take to be done.
  for (; j + 2 * kPanel <= n; j += 2 * kPanel) {
    bf16_column<8, 2>(c + j, ldc, rows, lda, panel(j), panel_size, m, k, accumulate, ask);
  }
  for (; j < n; j += kPanel) {
    bf16_column<16, 1>(c + j, ldc, rows, lda, panel(j), panel_size, m, k, accumulate, ask);
  }
}

void gemm_bf16(float* c, int64_t ldc, const void* a, int64_t lda, const void* b, int64_t panel_rows, int m, int n,
               int k, bool accumulate) {
  gemm_bf16_asking(c, ldc, a, lda, b, panel_rows, m, n, k, accumulate, [] {});
}

void gemm_bf16_ahead(float* c, int64_t ldc, const void* a, int64_t lda, const void* b, int64_t panel_rows, int m, int n,
                     int k, RowsAhead& ahead) {
  gemm_bf16_asking(c, ldc, a, lda, b, panel_rows, m, n, k, false, [&] { ahead.ask(); });
}

}  // namespace

const TileOps& avx512bf16_tile_ops() {
  static constexpr TileOps kOps = {.name = "avx512_bf16",
                                   .element_size = 2,
                                   .k_multiple = 2,
                                   .begin = &nothing,
                                   .end = &nothing,
                                   .load_rows = &load_rows_as_bf16,
                                   .pack_keys = &pack_keys_as_bf16,
                                   .pack_values = &pack_values_as_bf16,
                                   .gemm = &gemm_bf16,
                                   .gemm_ahead = &gemm_bf16_ahead,
                                   .gemm_rows = &gemm_rows_bf16,
                                   .split = &split_into_bf16,
                                   .transpose = &transpose_floats,
                                   .softmax = &softmax<StoreBf16>,
                                   .store_rows = &store_rows};
  return kOps;
}

}  // namespace attnops::cpu
