#pragma once
// Both products of a tile on AMX, for up to sixteen query rows at once, in place of kernel_bf16.h's.
//
//   scores [tokens, rows] = keys x queries: the keys of sixteen tokens are an operand as they lie in their page. So a
//     key is loaded once for all rows, and nothing is added across lanes. Queries are packed as pairs, once per
//     request.
//   values [rows, columns] = probabilities x values: two tokens' rows are interleaved, as kernel_bf16.h says, but once
//     for all rows. Columns have its order, and so have the accumulators.
//
// Tiles 0-3 are sums, 4 and 5 what changes fastest, 6 and 7 what is kept. All have sixteen rows of 64 bytes.
#include <type_traits>

#include "cpu/tile/amx.h"
#include "xqa_decode/cpu/kernel_bf16.h"
#include "xqa_decode/params.h"

namespace attnops::xqa_decode::cpu {
namespace {

#if defined(ATTNOPS_EMULATE_AMX)
using attnops::cpu::amx_model;
#endif
using attnops::cpu::memory_barrier;

constexpr int kAmxRows = 16;   // of a tile
constexpr int kAmxBytes = 64;  // of a row of a tile
constexpr int kAmxPanel = kAmxRows * kAmxBytes;
constexpr int kAmxSums = 4;  // tiles of sums
constexpr int kAmxGroups = kTileTokens / kAmxRows;
static_assert(kAmxRows == kPackedRows && kAmxGroups == 4);

constexpr int amx_columns(int head_dim) { return up_to_multiple(head_dim, kPairs); }

// What a tile works in, behind kernel.h's scores of four rows.
struct AmxScratch {
  BHalf* p;      // [16, kTileTokens]
  float* raw;    // [kTileTokens, 16]: scores of a block of rows
  char* keys;    // [kTileTokens, columns]: of rows that do not lie at one distance
  char* tail;    // [kTileTokens, 32]: the last elements of a head dim that is no multiple of 32, and zeros
  char* panels;  // [2, kAmxSums, 16, 64 bytes]: values as pairs of tokens
  float* sums;   // [16, columns]

  static constexpr int kPBytes = kAmxRows * kTileTokens * 2, kRawBytes = kTileTokens * kAmxRows * 4;
  static constexpr int kTailBytes = kTileTokens * kAmxBytes, kPanelBytes = 2 * kAmxSums * kAmxPanel;
  static int bytes(int head_dim) {
    const int columns = amx_columns(head_dim);
    return kScoreBytes + kPBytes + kRawBytes + kTailBytes + kPanelBytes + kTileTokens * columns * 2 +
           kAmxRows * columns * 4;
  }

  AmxScratch(char* scratch, int head_dim) {
    const int columns = amx_columns(head_dim);
    char* next = scratch + kScoreBytes;
    const auto take = [&](int bytes) { return (next += bytes) - bytes; };
    p = reinterpret_cast<BHalf*>(take(kPBytes));
    raw = reinterpret_cast<float*>(take(kRawBytes));
    tail = take(kTailBytes);
    keys = take(kTileTokens * columns * 2);
    panels = take(kPanelBytes);
    sums = reinterpret_cast<float*>(take(kAmxRows * columns * 4));
  }
};

// Packed queries, row by row, become the pairs of each block of rows: [columns / 2, 16].
inline void pair_queries(char* q, int num_rows, int head_dim) {
  const int pairs = amx_columns(head_dim) / 2;
  uint32_t copy[kAmxRows * kMaxHeadDim / 2];
  for (int row = 0; row < num_rows; row += kAmxRows) {
    auto* block = reinterpret_cast<uint32_t*>(q) + static_cast<int64_t>(row) * pairs;
    const int used = num_rows - row < kAmxRows ? num_rows - row : kAmxRows;
    __builtin_memcpy(copy, block, sizeof(uint32_t) * used * pairs);
    for (int pair = 0; pair < pairs; ++pair) {
      for (int r = 0; r < kAmxRows; ++r) block[pair * kAmxRows + r] = r < used ? copy[r * pairs + pair] : 0;
    }
  }
}

// The keys of sixteen tokens, at one distance of each other: as they lie, or a copy.
struct AmxKeys {
  const char* first;
  int64_t step;
  const char* tail;

  AmxKeys(const char* const* rows, int head_dim, char* copy, char* tails)
      : first(rows[0]), step(rows[1] - rows[0]), tail(tails) {
    bool even = true;
    for (int t = 2; t < kAmxRows; ++t) even = even && rows[t] - rows[t - 1] == step;
    if (!even) {
      const int bytes = head_dim * 2;
      for (int t = 0; t < kAmxRows; ++t) __builtin_memcpy(copy + t * bytes, rows[t], bytes);
      first = copy, step = bytes;
    }
    const int rest = head_dim % kPairs;
    if (rest == 0) return;
    for (int t = 0; t < kAmxRows; ++t) {
      const auto* from = reinterpret_cast<const BHalf*>(rows[t]) + head_dim - rest;
      _mm512_storeu_si512(tails + t * kAmxBytes, load_pairs(from, rest).each[0]);
    }
  }
};

// raw[token, row] of the tile's tokens.
inline void amx_scores(const Tile& tile, const char* q, const AmxScratch& scratch, Ahead& ahead) {
  const int chunks = amx_columns(tile.head_dim) / kPairs, full = tile.head_dim / kPairs;
  const auto at = [&](int group) {
    const int token = group * kAmxRows;
    return AmxKeys(tile.k_rows + token, tile.head_dim, scratch.keys + token * tile.head_dim * 2,
                   scratch.tail + token * kAmxBytes);
  };
  const AmxKeys k[kAmxGroups] = {at(0), at(1), at(2), at(3)};
  ahead.spread(ATTNOPS_FETCH_WITH_SCORES, kAmxGroups * chunks);
  memory_barrier();
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  _tile_zero(3);
  for (int chunk = 0; chunk < chunks; ++chunk) {
    const bool whole = chunk < full;
    const auto rows = [&](int group) { return whole ? k[group].first + chunk * kAmxBytes : k[group].tail; };
    const auto step = [&](int group) { return whole ? k[group].step : int64_t{kAmxBytes}; };
    _tile_loadd(6, q + chunk * kAmxPanel, kAmxBytes);
    _tile_loadd(4, rows(0), step(0));
    _tile_dpbf16ps(0, 4, 6);
    ahead.fetch();
    _tile_loadd(5, rows(1), step(1));
    _tile_dpbf16ps(1, 5, 6);
    ahead.fetch();
    _tile_loadd(4, rows(2), step(2));
    _tile_dpbf16ps(2, 4, 6);
    ahead.fetch();
    _tile_loadd(5, rows(3), step(3));
    _tile_dpbf16ps(3, 5, 6);
    ahead.fetch();
  }
  _tile_stored(0, scratch.raw, kAmxBytes);
  _tile_stored(1, scratch.raw + kAmxRows * kAmxRows, kAmxBytes);
  _tile_stored(2, scratch.raw + 2 * kAmxRows * kAmxRows, kAmxBytes);
  _tile_stored(3, scratch.raw + 3 * kAmxRows * kAmxRows, kAmxBytes);
  memory_barrier();
}

// Four rows of raw, from `row` on, side by side: scores[row * kTileTokens + token].
inline void rows_of_scores(const float* raw, int row, float* scores) {
  for (int t0 = 0; t0 < kTileTokens; t0 += Vec::kLanes) {
    __m512 quad[4];  // lane-of-128 j of quad[i]: four rows of token t0 + 4 j + i
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) {
      const float* from = raw + (t0 + i) * kAmxRows + row;
      quad[i] = _mm512_castps128_ps512(_mm_loadu_ps(from));
      quad[i] = _mm512_mask_broadcast_f32x4(quad[i], 0x00F0, _mm_loadu_ps(from + 4 * kAmxRows));
      quad[i] = _mm512_mask_broadcast_f32x4(quad[i], 0x0F00, _mm_loadu_ps(from + 8 * kAmxRows));
      quad[i] = _mm512_mask_broadcast_f32x4(quad[i], 0xF000, _mm_loadu_ps(from + 12 * kAmxRows));
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

// Values of kChunks * 32 columns from chunk `first` on. Panel c of half h: columns 16 c .. 16 c + 15 of these, in the
// order of the accumulators, of tokens 32 h .. 32 h + 31.
template <int kChunks>
inline void amx_panels(const Tile& tile, int first, char* panels, Ahead& ahead) {
  const int pairs = up_to_multiple(tile.num_tokens, kPairs) / 2;
  const int column = first * kPairs;
  for (int pair = 0; pair < pairs; ++pair) {
    const auto* even = reinterpret_cast<const BHalf*>(tile.v_rows[2 * pair]) + column;
    const auto* odd = reinterpret_cast<const BHalf*>(tile.v_rows[2 * pair + 1]) + column;
    char* to = panels + pair / kAmxRows * kAmxSums * kAmxPanel + pair % kAmxRows * kAmxBytes;
#pragma GCC unroll 2
    for (int c = 0; c < kChunks; ++c) {
      const __m512i a = load_pairs(even + c * kPairs, tile.head_dim - column - c * kPairs).each[0];
      const __m512i b = load_pairs(odd + c * kPairs, tile.head_dim - column - c * kPairs).each[0];
      _mm512_store_si512(to + 2 * c * kAmxPanel, _mm512_unpacklo_epi16(a, b));
      _mm512_store_si512(to + (2 * c + 1) * kAmxPanel, _mm512_unpackhi_epi16(a, b));
    }
    ahead.fetch();
  }
}

// sums[row, 16 columns of each panel] = p * v.
template <int kChunks>
inline void amx_values(const char* panels, int halves, float* sums, int64_t sums_bytes) {
  memory_barrier();
  _tile_zero(0);
  _tile_zero(1);
  if constexpr (kChunks == 2) _tile_zero(2);
  if constexpr (kChunks == 2) _tile_zero(3);
  _tile_loadd(4, panels, kAmxBytes);
  _tile_dpbf16ps(0, 6, 4);
  _tile_loadd(5, panels + kAmxPanel, kAmxBytes);
  _tile_dpbf16ps(1, 6, 5);
  if constexpr (kChunks == 2) {
    _tile_loadd(4, panels + 2 * kAmxPanel, kAmxBytes);
    _tile_dpbf16ps(2, 6, 4);
    _tile_loadd(5, panels + 3 * kAmxPanel, kAmxBytes);
    _tile_dpbf16ps(3, 6, 5);
  }
  if (halves > 1) {
    const char* half = panels + kAmxSums * kAmxPanel;
    _tile_loadd(4, half, kAmxBytes);
    _tile_dpbf16ps(0, 7, 4);
    _tile_loadd(5, half + kAmxPanel, kAmxBytes);
    _tile_dpbf16ps(1, 7, 5);
    if constexpr (kChunks == 2) {
      _tile_loadd(4, half + 2 * kAmxPanel, kAmxBytes);
      _tile_dpbf16ps(2, 7, 4);
      _tile_loadd(5, half + 3 * kAmxPanel, kAmxBytes);
      _tile_dpbf16ps(3, 7, 5);
    }
  }
  _tile_stored(0, sums, sums_bytes);
  _tile_stored(1, sums + Vec::kLanes, sums_bytes);
  if constexpr (kChunks == 2) {
    _tile_stored(2, sums + 2 * Vec::kLanes, sums_bytes);
    _tile_stored(3, sums + 3 * Vec::kLanes, sums_bytes);
  }
  memory_barrier();
}

// Probabilities of up to sixteen rows from their raw scores, and what these rows' accumulators are to be scaled by.
inline void amx_softmax(const Tile& tile, int block, int rows, const AmxScratch& scratch, float* rescale) {
  auto* scores = reinterpret_cast<float*>(tile.scratch);
  for (int row = 0; row < rows; ++row) {
    if (row % kBlockRows == 0) rows_of_scores(scratch.raw, row, scores);
    BHalf* p = scratch.p + row * kTileTokens;
    rescale[row] = softmax_row<PairMath<BHalf>>(tile, block + row, scores + row % kBlockRows * kTileTokens, p);
    const int written = up_to_multiple(tile.num_tokens, Vec::kLanes);
    if (written % kPairs != 0) _mm256_storeu_si256(reinterpret_cast<__m256i*>(p + written), _mm256_setzero_si256());
  }
}

// Where a token has too few rows for a product of tiles: values are interleaved in registers, for four rows at a time.
inline void add_few_values(const Tile& tile, int block, int rows, const AmxScratch& scratch, const float* rescale,
                           Ahead& ahead) {
  using Math = PairMath<BHalf>;
  const int stride = amx_columns(tile.head_dim);
  for (int row = 0; row < rows; row += kBlockRows) {
    const auto add = [&](auto count) {
      add_all_values<Math, decltype(count)::value>(tile, tile.v_rows, scratch.p + row * kTileTokens, rescale + row,
                                                   tile.acc + static_cast<int64_t>(block + row) * stride, stride,
                                                   ahead);
    };
    const int left = rows - row;
    if (left >= kBlockRows) {
      add(std::integral_constant<int, kBlockRows>());
    } else if (left == 3) {
      add(std::integral_constant<int, 3>());
    } else if (left == 2) {
      add(std::integral_constant<int, 2>());
    } else {
      add(std::integral_constant<int, 1>());
    }
  }
}

inline void add_block_of_values(const Tile& tile, int block, int rows, const AmxScratch& scratch, const float* rescale,
                                Ahead& ahead) {
  const int columns = amx_columns(tile.head_dim), chunks = columns / kPairs;
  const int halves = tile.num_tokens > kPairs ? 2 : 1;
  const int64_t sums_bytes = columns * static_cast<int64_t>(sizeof(float));
  ahead.spread(8 - ATTNOPS_FETCH_WITH_SCORES, halves * kPairs / 2 * ((chunks + 1) / 2));
  memory_barrier();
  _tile_loadd(6, scratch.p, kTileTokens * 2);
  if (halves > 1) _tile_loadd(7, scratch.p + kPairs, kTileTokens * 2);
  for (int chunk = 0; chunk < chunks; chunk += 2) {
    if (chunk + 1 < chunks) {
      amx_panels<2>(tile, chunk, scratch.panels, ahead);
      amx_values<2>(scratch.panels, halves, scratch.sums + chunk * kPairs, sums_bytes);
    } else {
      amx_panels<1>(tile, chunk, scratch.panels, ahead);
      amx_values<1>(scratch.panels, halves, scratch.sums + chunk * kPairs, sums_bytes);
    }
  }
  for (int row = 0; row < rows; ++row) {
    float* acc = tile.acc + static_cast<int64_t>(block + row) * columns;
    const Vec::Reg factor = Vec::all(rescale[row]);
    for (int c = 0; c < columns; c += Vec::kLanes) {
      Vec::store(acc + c, Vec::fma(Vec::load(acc + c), factor, Vec::load(scratch.sums + row * columns + c)));
    }
  }
}

inline void attend_amx(const Tile& tile) {
  const AmxScratch scratch(tile.scratch, tile.head_dim);
  const int64_t q_bytes = static_cast<int64_t>(amx_columns(tile.head_dim)) * 2;
  Ahead ahead(tile);
  for (int block = 0; block < tile.num_rows; block += kAmxRows) {
    const int rows = tile.num_rows - block < kAmxRows ? tile.num_rows - block : kAmxRows;
    float rescale[kAmxRows];
    amx_scores(tile, tile.q + block * q_bytes, scratch, ahead);
    amx_softmax(tile, block, rows, scratch, rescale);
    // By the rows of a token, not of the tile: a token has the same bits alone and among the others of its request.
    if (tile.group <= kBlockRows) {
      add_few_values(tile, block, rows, scratch, rescale, ahead);
    } else {
      add_block_of_values(tile, block, rows, scratch, rescale, ahead);
    }
  }
}

constexpr TileKernel amx_kernel() {
  TileKernel kernel = pair_kernel<false>();
  kernel.scratch_bytes = AmxScratch::bytes;
  kernel.attend = attend_amx;
  kernel.begin = attnops::cpu::configure_tiles;
  kernel.end = attnops::cpu::release_tiles;
  kernel.arrange_q = pair_queries;
  return kernel;
}

}  // namespace
}  // namespace attnops::xqa_decode::cpu
