#include "cpu/tile/vec_avx512.h"
// Vec comes first.
#include "cpu/tile/amx.h"
#include "cpu/tile/bf16.h"

namespace attnops::cpu {
namespace {

constexpr int kTile = 16;         // rows, and columns of floats
constexpr int kTileK = 32;        // elements of k in one product
constexpr int kPanelStride = 64;  // bytes between the rows of a panel

// Tiles 0-3 accumulate, 4 and 5 hold rows of a, 6 and 7 panels of b. A 16 x 32 block of `a` times 32 x 16 of `b`, the
// latter as 16 rows of 16 pairs, is one instruction.
template <bool kTwoRows, bool kTwoPanels>
inline void amx_block(float* c, int64_t ldc, const uint16_t* a, int64_t lda, const uint16_t* b, int64_t panel_size,
                      int k, bool accumulate) {
  const int64_t c_stride = ldc * static_cast<int64_t>(sizeof(float));
  const int64_t a_stride = lda * static_cast<int64_t>(sizeof(uint16_t));
  float* c_below = c + kTile * ldc;
  const uint16_t* a_below = a + kTile * lda;
  const uint16_t* b_right = b + panel_size;
  memory_barrier();
  if (accumulate) {
    _tile_loadd(0, c, c_stride);
    if constexpr (kTwoPanels) _tile_loadd(1, c + kTile, c_stride);
    if constexpr (kTwoRows) _tile_loadd(2, c_below, c_stride);
    if constexpr (kTwoRows && kTwoPanels) _tile_loadd(3, c_below + kTile, c_stride);
  } else {
    _tile_zero(0);
    if constexpr (kTwoPanels) _tile_zero(1);
    if constexpr (kTwoRows) _tile_zero(2);
    if constexpr (kTwoRows && kTwoPanels) _tile_zero(3);
  }
  for (int i = 0; i < k; i += kTileK) {
    _tile_loadd(4, a + i, a_stride);
    _tile_loadd(6, b + i * kPanel, kPanelStride);
    _tile_dpbf16ps(0, 4, 6);
    if constexpr (kTwoPanels) {
      _tile_loadd(7, b_right + i * kPanel, kPanelStride);
      _tile_dpbf16ps(1, 4, 7);
    }
    if constexpr (kTwoRows) {
      _tile_loadd(5, a_below + i, a_stride);
      _tile_dpbf16ps(2, 5, 6);
      if constexpr (kTwoPanels) _tile_dpbf16ps(3, 5, 7);
    }
  }
  _tile_stored(0, c, c_stride);
  if constexpr (kTwoPanels) _tile_stored(1, c + kTile, c_stride);
  if constexpr (kTwoRows) _tile_stored(2, c_below, c_stride);
  if constexpr (kTwoRows && kTwoPanels) _tile_stored(3, c_below + kTile, c_stride);
  memory_barrier();
}

template <bool kTwoPanels>
inline void amx_column(float* c, int64_t ldc, const uint16_t* a, int64_t lda, const uint16_t* b, int64_t panel_size,
                       int m, int k, bool accumulate) {
  int r = 0;
  for (; r + kTile < m; r += 2 * kTile) {
    amx_block<true, kTwoPanels>(c + r * ldc, ldc, a + r * lda, lda, b, panel_size, k, accumulate);
  }
  if (r < m) amx_block<false, kTwoPanels>(c + r * ldc, ldc, a + r * lda, lda, b, panel_size, k, accumulate);
}

void gemm_amx(float* c, int64_t ldc, const void* a, int64_t lda, const void* b, int64_t panel_rows, int m, int n, int k,
              bool accumulate) {
  const int64_t panel_size = panel_rows * kPanel;
  const uint16_t* rows = static_cast<const uint16_t*>(a);
  const uint16_t* panels = static_cast<const uint16_t*>(b);
  int j = 0;
  for (; j + 2 * kPanel <= n; j += 2 * kPanel) {
    amx_column<true>(c + j, ldc, rows, lda, panels + j / kPanel * panel_size, panel_size, m, k, accumulate);
  }
  if (j < n) amx_column<false>(c + j, ldc, rows, lda, panels + j / kPanel * panel_size, panel_size, m, k, accumulate);
}

}  // namespace

const TileOps& amx_tile_ops() {
  static constexpr TileOps kOps = {.name = "amx_bf16",
                                   .element_size = 2,
                                   .k_multiple = kTileK,
                                   .begin = &configure_tiles,
                                   .end = &release_tiles,
                                   .load_rows = &load_rows_as_bf16,
                                   .pack_keys = &pack_keys_as_bf16,
                                   .pack_values = &pack_values_as_bf16,
                                   .gemm = &gemm_amx,
                                   .gemm_ahead = &gemm_unasked<gemm_amx>,
                                   .gemm_rows = nullptr,
                                   .split = &split_into_bf16,
                                   .transpose = &transpose_floats,
                                   .softmax = &softmax<StoreBf16>,
                                   .store_rows = &store_rows};
  return kOps;
}

}  // namespace attnops::cpu
