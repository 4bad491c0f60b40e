#pragma once
// Scores as products of AMX tiles for kernel_bf16.h: sixteen tokens' keys are one operand as they lie in their page, the
// queries of a block of rows the other. So a key is loaded once for all rows, and nothing is added across lanes.
//
//   tiles 0-3: scores [16 tokens, rows] of up to 64 tokens; 4: keys [16 tokens, 32 elements]; 6: queries [16 pairs, rows]
//   tiles 5, 7: the same two for the last elements of a head dim that is no multiple of 32
#include "xqa_decode/cpu/kernel_bf16.h"
#include "xqa_decode/params.h"

namespace attnops::xqa_decode::cpu {
namespace {

constexpr int kAmxTokens = 16;  // rows of a tile

struct alignas(64) AmxConfig {
  uint8_t palette = 1;
  uint8_t start_row = 0;
  uint8_t reserved[14] = {};
  uint16_t bytes_per_row[16] = {};
  uint8_t rows[16] = {};
};
static_assert(sizeof(AmxConfig) == 64);

inline void begin_amx(int num_rows, int head_dim) {
  AmxConfig config;
  const auto columns = static_cast<uint16_t>(block_rows(num_rows) * 4);
  const int rest = head_dim % kPairs == 0 ? kPairs : head_dim % kPairs;
  for (const int tile : {0, 1, 2, 3}) config.rows[tile] = kAmxTokens, config.bytes_per_row[tile] = columns;
  config.rows[4] = kAmxTokens, config.bytes_per_row[4] = kPairs * 2;
  config.rows[5] = kAmxTokens, config.bytes_per_row[5] = static_cast<uint16_t>(rest * 2);
  config.rows[6] = kPairs / 2, config.bytes_per_row[6] = columns;
  config.rows[7] = static_cast<uint8_t>(rest / 2), config.bytes_per_row[7] = columns;
  __asm__ volatile("" ::"r"(&config) : "memory");  // some compilers' intrinsic does not say that it reads all of it
  _tile_loadconfig(&config);
}

inline void end_amx() { _tile_release(); }

// Rows of packed queries become, for each block of rows, its pairs: [head_dim / 2, rows of the block].
inline void pair_queries(char* q, int num_rows, int head_dim) {
  const int rows = block_rows(num_rows), pairs = up_to_multiple(head_dim, kPairs) / 2;
  uint32_t copy[kMaxBlockRows * kMaxHeadDim / 2];
  for (int row = 0; row < num_rows; row += rows) {
    auto* block = reinterpret_cast<uint32_t*>(q) + static_cast<int64_t>(row) * pairs;
    const int used = num_rows - row < rows ? num_rows - row : rows;
    __builtin_memcpy(copy, block, sizeof(uint32_t) * used * pairs);
    for (int pair = 0; pair < pairs; ++pair) {
      for (int r = 0; r < rows; ++r) block[pair * rows + r] = r < used ? copy[r * pairs + pair] : 0;
    }
  }
}

// The intrinsics of some compilers do not say that they read memory.
inline void memory_barrier() { __asm__ volatile("" ::: "memory"); }

// Sixteen rows at one distance of each other: as they lie, or a copy of them.
struct KeyRows {
  const char* first;
  int64_t step;

  KeyRows(const char* const* rows, int head_dim, char* copy) : first(rows[0]), step(rows[1] - rows[0]) {
    bool even = true;
    for (int t = 2; t < kAmxTokens; ++t) even = even && rows[t] - rows[t - 1] == step;
    if (even) return;
    const int bytes = head_dim * 2;
    for (int t = 0; t < kAmxTokens; ++t) __builtin_memcpy(copy + t * bytes, rows[t], bytes);
    first = copy, step = bytes;
  }
};

// raw[token * rows + row] of up to 64 tokens.
inline void score_products(const Tile& tile, const char* const* k_rows, const char* q, int rows, float* raw,
                           char* copies, Ahead& ahead) {
  const int groups = (tile.num_tokens + kAmxTokens - 1) / kAmxTokens;
  const int full = tile.head_dim / kPairs;
  const bool rest = tile.head_dim % kPairs != 0;
  const int64_t q_step = static_cast<int64_t>(rows) * 4;
  const int copy_bytes = kAmxTokens * tile.head_dim * 2;
  ahead.spread_half(groups * (full + rest));
  const auto at = [&](int group) {
    return KeyRows(k_rows + group * kAmxTokens, tile.head_dim, copies + group * copy_bytes);
  };
  const KeyRows k[4] = {at(0), at(groups > 1 ? 1 : 0), at(groups > 2 ? 2 : 0), at(groups > 3 ? 3 : 0)};
  memory_barrier();
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  _tile_zero(3);
  for (int chunk = 0; chunk < full; ++chunk) {
    const int64_t offset = chunk * kPairs * 2;
    _tile_loadd(6, q + chunk * (kPairs / 2) * q_step, q_step);
    _tile_loadd(4, k[0].first + offset, k[0].step);
    _tile_dpbf16ps(0, 4, 6);
    ahead.fetch();
    if (groups > 1) {
      _tile_loadd(4, k[1].first + offset, k[1].step);
      _tile_dpbf16ps(1, 4, 6);
      ahead.fetch();
    }
    if (groups > 2) {
      _tile_loadd(4, k[2].first + offset, k[2].step);
      _tile_dpbf16ps(2, 4, 6);
      ahead.fetch();
    }
    if (groups > 3) {
      _tile_loadd(4, k[3].first + offset, k[3].step);
      _tile_dpbf16ps(3, 4, 6);
      ahead.fetch();
    }
  }
  if (rest) {
    const int64_t offset = full * kPairs * 2;
    _tile_loadd(7, q + full * (kPairs / 2) * q_step, q_step);
    _tile_loadd(5, k[0].first + offset, k[0].step);
    _tile_dpbf16ps(0, 5, 7);
    _tile_loadd(5, k[1].first + offset, k[1].step);
    _tile_dpbf16ps(1, 5, 7);
    _tile_loadd(5, k[2].first + offset, k[2].step);
    _tile_dpbf16ps(2, 5, 7);
    _tile_loadd(5, k[3].first + offset, k[3].step);
    _tile_dpbf16ps(3, 5, 7);
    for (int i = 0; i < groups; ++i) ahead.fetch();
  }
  const int64_t step = static_cast<int64_t>(kAmxTokens) * rows;
  _tile_stored(0, raw, q_step);
  if (groups > 1) _tile_stored(1, raw + step, q_step);
  if (groups > 2) _tile_stored(2, raw + 2 * step, q_step);
  if (groups > 3) _tile_stored(3, raw + 3 * step, q_step);
  memory_barrier();
}

// Four rows of raw, from `row` on, side by side: scores[row * kTileTokens + token].
inline void rows_of_scores(const float* raw, int rows, int row, int num_tokens, float* scores) {
  for (int t0 = 0; t0 < num_tokens; t0 += kAmxTokens) {
    __m512 quad[4];  // lane-of-128 j of quad[i]: four rows of token t0 + 4 j + i
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) {
      const float* from = raw + (t0 + i) * rows + row;
      quad[i] = _mm512_castps128_ps512(_mm_loadu_ps(from));
      quad[i] = _mm512_mask_broadcast_f32x4(quad[i], 0x00F0, _mm_loadu_ps(from + 4 * rows));
      quad[i] = _mm512_mask_broadcast_f32x4(quad[i], 0x0F00, _mm_loadu_ps(from + 8 * rows));
      quad[i] = _mm512_mask_broadcast_f32x4(quad[i], 0xF000, _mm_loadu_ps(from + 12 * rows));
    }
    const auto low = [](__m512 a, __m512 b) { return _mm512_castps_pd(_mm512_unpacklo_ps(a, b)); };
    const auto high = [](__m512 a, __m512 b) { return _mm512_castps_pd(_mm512_unpackhi_ps(a, b)); };
    const __m512d a = low(quad[0], quad[1]), b = low(quad[2], quad[3]);
    const __m512d c = high(quad[0], quad[1]), d = high(quad[2], quad[3]);
    _mm512_storeu_ps(scores + t0, _mm512_castpd_ps(_mm512_unpacklo_pd(a, b)));
    _mm512_storeu_ps(scores + t0 + kTileTokens, _mm512_castpd_ps(_mm512_unpackhi_pd(a, b)));
    _mm512_storeu_ps(scores + t0 + 2 * kTileTokens, _mm512_castpd_ps(_mm512_unpacklo_pd(c, d)));
    _mm512_storeu_ps(scores + t0 + 3 * kTileTokens, _mm512_castpd_ps(_mm512_unpackhi_pd(c, d)));
  }
}

constexpr int kRawBytes = kTileTokens * kMaxBlockRows * static_cast<int>(sizeof(float));

inline int amx_scratch_bytes(int head_dim) { return kWideOffset + kRawBytes + kTileTokens * head_dim * 2; }

template <int kRows>
void values_of_rows(const Tile& tile, int row, float* scores, BHalf* p, Ahead& ahead) {
  using Math = PairMath<BHalf>;
  float rescale[kRows];
  for (int r = 0; r < kRows; ++r) {
    rescale[r] = softmax_row<Math>(tile, row + r, scores + r * kTileTokens, p + r * kTileTokens);
  }
  const int stride = accumulator_stride<Math>(tile.head_dim);
  add_all_values<Math, kRows>(tile, tile.v_rows, p, rescale, tile.acc + static_cast<int64_t>(row) * stride, stride,
                              ahead);
}

inline void attend_amx(const Tile& tile) {
  auto* scores = reinterpret_cast<float*>(tile.scratch);
  auto* p = reinterpret_cast<BHalf*>(tile.scratch + kScoreBytes);
  auto* raw = reinterpret_cast<float*>(tile.scratch + kWideOffset);
  const int rows = block_rows(tile.num_rows), row_bytes = packed_row_bytes<PairMath<BHalf>>(tile.head_dim);
  Ahead ahead(tile);
  for (int block = 0; block < tile.num_rows; block += rows) {
    const char* q = tile.q + static_cast<int64_t>(block) * row_bytes;
    score_products(tile, tile.k_rows, q, rows, raw, tile.scratch + kWideOffset + kRawBytes, ahead);
    const int end = block + rows < tile.num_rows ? block + rows : tile.num_rows;
    for (int row = block; row < end; row += kBlockRows) {
      rows_of_scores(raw, rows, row - block, tile.num_tokens, scores);
      const int left = end - row;
      if (left >= 4) values_of_rows<4>(tile, row, scores, p, ahead);
      if (left == 3) values_of_rows<3>(tile, row, scores, p, ahead);
      if (left == 2) values_of_rows<2>(tile, row, scores, p, ahead);
      if (left == 1) values_of_rows<1>(tile, row, scores, p, ahead);
    }
  }
}

constexpr TileKernel amx_kernel() {
  TileKernel kernel = pair_kernel<false>();
  kernel.scratch_bytes = amx_scratch_bytes;
  kernel.attend = attend_amx;
  kernel.begin = begin_amx;
  kernel.end = end_amx;
  kernel.arrange_q = pair_queries;
  return kernel;
}

}  // namespace
}  // namespace attnops::xqa_decode::cpu
