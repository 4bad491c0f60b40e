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

// kRows rows of c by kPanels panels in registers, two elements of k a step.
template <int kRows, int kPanels>
inline void bf16_block(float* c, int64_t ldc, const uint16_t* a, int64_t lda, const uint16_t* b, int64_t panel_size,
                       int k, bool accumulate) {
  __m512 acc[kRows][kPanels];
#pragma GCC unroll 16
  for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 4
    for (int p = 0; p < kPanels; ++p) {
      acc[r][p] = accumulate ? _mm512_loadu_ps(c + r * ldc + p * kPanel) : _mm512_setzero_ps();
    }
  }
  for (int i = 0; i < k; i += kPair) {
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

template <int kRows, int kPanels>
inline void bf16_tail(float* c, int64_t ldc, const uint16_t* a, int64_t lda, const uint16_t* b, int64_t panel_size,
                      int m, int k, bool accumulate) {
  if constexpr (kRows > 1) {
    if (m == kRows - 1) return bf16_block<kRows - 1, kPanels>(c, ldc, a, lda, b, panel_size, k, accumulate);
    bf16_tail<kRows - 1, kPanels>(c, ldc, a, lda, b, panel_size, m, k, accumulate);
  }
}

template <int kRows, int kPanels>
inline void bf16_column(float* c, int64_t ldc, const uint16_t* a, int64_t lda, const uint16_t* b, int64_t panel_size,
                        int m, int k, bool accumulate) {
  int r = 0;
  for (; r + kRows <= m; r += kRows) {
    bf16_block<kRows, kPanels>(c + r * ldc, ldc, a + r * lda, lda, b, panel_size, k, accumulate);
  }
  if (r < m) bf16_tail<kRows, kPanels>(c + r * ldc, ldc, a + r * lda, lda, b, panel_size, m - r, k, accumulate);
}

void gemm_bf16(float* c, int64_t ldc, const void* a, int64_t lda, const void* b, int64_t panel_rows, int m, int n,
               int k, bool accumulate) {
  constexpr int kRows = 6, kPanels = 4;  // 24 accumulators, 4 cells of b and one broadcast: 29 of 32 registers
  const int64_t panel_size = panel_rows * kPanel;
  const uint16_t* rows = static_cast<const uint16_t*>(a);
  const uint16_t* panels = static_cast<const uint16_t*>(b);
  int j = 0;
  for (; j + kPanels * kPanel <= n; j += kPanels * kPanel) {
    bf16_column<kRows, kPanels>(c + j, ldc, rows, lda, panels + j / kPanel * panel_size, panel_size, m, k, accumulate);
  }
  for (; j + 2 * kPanel <= n; j += 2 * kPanel) {
    bf16_column<kRows, 2>(c + j, ldc, rows, lda, panels + j / kPanel * panel_size, panel_size, m, k, accumulate);
  }
  for (; j < n; j += kPanel) {
    bf16_column<kRows, 1>(c + j, ldc, rows, lda, panels + j / kPanel * panel_size, panel_size, m, k, accumulate);
  }
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
                                   .transpose = &transpose_floats,
                                   .softmax = &softmax<StoreBf16>,
                                   .store_rows = &store_rows};
  return kOps;
}

}  // namespace attnops::cpu
