#pragma once
// One tile of a decode on a processor's vector registers. The including file has included vec256.h or vec512.h, which
// names the instruction set; everything is local to that file (vec256.h says why).
//
// A tile runs in three steps for each block of up to four query rows, which share every load of K and V:
//   1. <q, k>: kAccumulators sums at once, rows x tokens of them, added across by one transposition;
//   2. scale, cap, mask by selecting, online softmax in units of log2, probabilities to scratch;
//   3. acc = acc * 2^(old max - new max) + p * v, with a block of columns of all rows in registers.
#include "xqa_decode/cpu/elements.h"
#include "xqa_decode/cpu/tile.h"

// An including file may choose otherwise: the cache that rows are fetched to ahead, and how many eighths of them step 1
// asks for.
#ifndef ATTNOPS_FETCH_HINT
#define ATTNOPS_FETCH_HINT _MM_HINT_T0
#define ATTNOPS_FETCH_WITH_SCORES 4
#endif

namespace attnops::xqa_decode::cpu {
namespace {

constexpr int kBlockRows = 4;
constexpr int kCacheLine = 64;

// Scratch of one tile: scores and probabilities of a block of rows, then, for FP8, the tile in wider elements.
constexpr int kScoreBytes = kBlockRows * kTileTokens * static_cast<int>(sizeof(float));
constexpr int kWideOffset = 2 * kScoreBytes;

constexpr int up_to_multiple(int x, int of) { return (x + of - 1) / of * of; }

// 2^x for x <= 0, exactly 0 below -126.5: exact at whole numbers, else within 2e-7. The polynomial is a minimax fit of
// 2^f on [-1/2, 1/2] with constant term 1.
inline Vec::Reg exp2_of(Vec::Reg x) {
  x = Vec::max(Vec::all(-127.f), x);
  const Vec::Reg n = Vec::round(x);
  const Vec::Reg f = Vec::sub(x, n);
  Vec::Reg y = Vec::all(0x1.5bba14p-10f);
  y = Vec::fma(y, f, Vec::all(0x1.3cea88p-7f));
  y = Vec::fma(y, f, Vec::all(0x1.c6b752p-5f));
  y = Vec::fma(y, f, Vec::all(0x1.ebf9bcp-3f));
  y = Vec::fma(y, f, Vec::all(0x1.62e42ap-1f));
  y = Vec::fma(y, f, Vec::all(1.f));
  return Vec::scale(y, n);
}

// (1 - e) / (1 + e) with e = exp(-2 |x|), and the sign of x.
inline Vec::Reg tanh_of(Vec::Reg x) {
  const Vec::Reg minus = Vec::sub(Vec::zero(), x);
  const Vec::Reg magnitude = Vec::max(minus, x);
  const Vec::Reg e = exp2_of(Vec::mul(magnitude, Vec::all(-2.885390081777927f)));
  const Vec::Reg t = Vec::div(Vec::sub(Vec::all(1.f), e), Vec::add(Vec::all(1.f), e));
  const Vec::Reg one = Vec::div(x, Vec::max(magnitude, Vec::all(1e-30f)));  // sign of x, 0 at 0
  return Vec::mul(t, one);
}

// Rows that will be read after this tile. They are fetched a few lines at a time between the arithmetic: a core has two
// dozen misses in flight, and a burst of prefetches would stall the loads behind it.
class Ahead {
 public:
  explicit Ahead(const Tile& tile)
      : next_(tile.fetch_rows),
        end_(next_ + tile.num_fetch),
        bytes_(tile.fetch_bytes),
        lines_(tile.num_fetch * ((tile.fetch_bytes + kCacheLine - 1) / kCacheLine)) {}

  // From now on each `fetch` takes so many lines that so many eighths of all take `steps` of them.
  void spread(int eighths, int steps) { each_ = (lines_ * eighths + 8 * steps - 1) / (8 * steps); }

  void fetch() {
    for (int i = 0; i < each_ && next_ < end_; ++i) {
      _mm_prefetch(*next_ + at_, ATTNOPS_FETCH_HINT);
      at_ += kCacheLine;
      if (at_ >= bytes_) at_ = 0, ++next_;
    }
  }

 private:
  const char* const* next_;
  const char* const* const end_;
  const int bytes_, lines_;
  int each_ = 0, at_ = 0;
};

// float32 arithmetic on elements of type T: the math of every kernel but the one with bf16 products.
template <class T>
struct FloatMath {
  using Element = T;
  using Product = float;  // of packed queries and probabilities
  using Reg = Vec::Reg;
  static constexpr int kChunk = Vec::kLanes;  // elements at a time
  static constexpr int kPadding = kChunk;     // packed queries and accumulators are multiples of
  static constexpr int kTokenStep = 1;        // tokens that one step of p * v takes

  static Reg load(const char* row, int chunk, int count = kChunk) {
    return Vec::load_elements(reinterpret_cast<const T*>(row) + chunk * kChunk, count);
  }
  static Reg load_query(const char* row, int chunk) {
    return Vec::load(reinterpret_cast<const float*>(row) + chunk * kChunk);
  }
  static Reg dot(Reg sum, Reg q, Reg k) { return Vec::fma(q, k, sum); }
  static void store_wide(char* row, int chunk, Reg x) { Vec::store(reinterpret_cast<float*>(row) + chunk * kChunk, x); }
  static void store_probabilities(float* to, Reg p) { Vec::store(to, p); }

  // acc rows [kRows] x kCount registers of columns from `column`.
  template <int kRows, int kCount, bool kPart>
  static void add_values(const char* const* v_rows, int num_tokens, const float* p, const float* rescale, float* acc,
                         int acc_stride, int column, int part, Ahead& ahead) {
    Reg sum[kRows][kCount];
#pragma GCC unroll 4
    for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 4
      for (int c = 0; c < kCount; ++c) {
        sum[r][c] = Vec::mul(Vec::load(acc + r * acc_stride + column + c * kChunk), Vec::broadcast(rescale + r));
      }
    }
    for (int t = 0; t < num_tokens; ++t) {
      ahead.fetch();
      Reg v[kCount];
#pragma GCC unroll 4
      for (int c = 0; c < kCount; ++c) v[c] = load(v_rows[t], column / kChunk + c, kPart ? part : kChunk);
#pragma GCC unroll 4
      for (int r = 0; r < kRows; ++r) {
        const Reg weight = Vec::broadcast(p + r * kTileTokens + t);
#pragma GCC unroll 4
        for (int c = 0; c < kCount; ++c) sum[r][c] = Vec::fma(weight, v[c], sum[r][c]);
      }
    }
#pragma GCC unroll 4
    for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 4
      for (int c = 0; c < kCount; ++c) Vec::store(acc + r * acc_stride + column + c * kChunk, sum[r][c]);
    }
  }
  static constexpr int kColumnRegisters = Vec::kColumns;  // per row, in add_values
  static constexpr int kColumns = Vec::kLanes;            // that one of them covers
};

// Step 1: scores[row * kTileTokens + token] of kRows rows.
template <class Math, int kRows>
void dot_products(const Tile& tile, const char* const* k_rows, const char* q, int q_row_bytes, float* scores,
                  Ahead& ahead) {
  constexpr int kPlaces = kRows == 3 ? 4 : kRows;        // of the accumulators
  constexpr int kTokens = Vec::kAccumulators / kPlaces;  // at a time
  const int full = tile.head_dim / Math::kChunk, rest = tile.head_dim % Math::kChunk;
  ahead.spread(ATTNOPS_FETCH_WITH_SCORES, up_to_multiple(tile.num_tokens, kTokens) / kTokens * (full + (rest > 0)));
  for (int t0 = 0; t0 < tile.num_tokens; t0 += kTokens) {
    Vec::Reg sum[Vec::kAccumulators];
#pragma GCC unroll 16
    for (int i = 0; i < Vec::kAccumulators; ++i) sum[i] = Vec::zero();
    const auto add_chunk = [&](int chunk, int count) __attribute__((always_inline)) {
      ahead.fetch();
      decltype(Math::load(nullptr, 0)) k[kTokens];
#pragma GCC unroll 16
      for (int t = 0; t < kTokens; ++t) k[t] = Math::load(k_rows[t0 + t], chunk, count);
#pragma GCC unroll 4
      for (int r = 0; r < kRows; ++r) {
        const auto query = Math::load_query(q + r * q_row_bytes, chunk);
#pragma GCC unroll 16
        for (int t = 0; t < kTokens; ++t) sum[r * kTokens + t] = Math::dot(sum[r * kTokens + t], query, k[t]);
      }
    };
    for (int chunk = 0; chunk < full; ++chunk) add_chunk(chunk, Math::kChunk);
    if (rest > 0) add_chunk(full, rest);
    Vec::scatter<kRows, kTokens>(scores + t0, kTileTokens, Vec::sums(sum));
  }
}

// Step 2, one row: scores become probabilities; returns the factor for what was accumulated before.
template <class Math>
float softmax_row(const Tile& tile, int row, float* scores, typename Math::Product* p) {
  const uint64_t last = ~uint64_t{0} >> (kTileTokens - tile.num_tokens);
  const uint64_t visible = tile.visible ? tile.visible[row] & last : last;
  Vec::Reg largest = Vec::all(-__builtin_inff());
  for (int t = 0; t < tile.num_tokens; t += Vec::kLanes) {
    Vec::Reg x = Vec::mul(Vec::load(scores + t), Vec::all(tile.score_scale));
    if (tile.score_cap != 0.f) x = Vec::mul(tanh_of(x), Vec::all(tile.score_cap));
    x = Vec::keep(x, visible >> t);
    Vec::store(scores + t, x);
    largest = Vec::max(largest, x);
  }
  const float old_max = tile.row_max[row], tile_max = Vec::largest(largest);
  const float new_max = tile_max > old_max ? tile_max : old_max;
  const float base = new_max == -__builtin_inff() ? 0.f : new_max;  // nothing visible yet: every p is 2^-inf = 0
  alignas(64) float rescale[Vec::kLanes];
  Vec::store(rescale, exp2_of(Vec::all(old_max - base)));
  Vec::Reg sum = Vec::zero();
  for (int t = 0; t < tile.num_tokens; t += Vec::kLanes) {
    const Vec::Reg weight = exp2_of(Vec::sub(Vec::load(scores + t), Vec::all(base)));
    Math::store_probabilities(p + t, weight);
    sum = Vec::add(sum, weight);
  }
  tile.row_max[row] = new_max;
  tile.row_sum[row] = tile.row_sum[row] * rescale[0] + Vec::sum(sum);
  return rescale[0];
}

// Step 3.
template <class Math, int kRows>
void add_all_values(const Tile& tile, const char* const* v_rows, const typename Math::Product* p, const float* rescale,
                    float* acc, int acc_stride, Ahead& ahead) {
  const int tokens = up_to_multiple(tile.num_tokens, Math::kTokenStep);
  constexpr int kWide = Math::kColumnRegisters * Math::kColumns / Math::kChunk;  // chunks of the widest block
  ahead.spread(8 - ATTNOPS_FETCH_WITH_SCORES,
               tokens / Math::kTokenStep * ((tile.head_dim - 1) / (kWide * Math::kChunk) + 1));
  int column = 0;
  for (; column + kWide * Math::kChunk <= tile.head_dim; column += kWide * Math::kChunk) {
    Math::template add_values<kRows, kWide, false>(v_rows, tokens, p, rescale, acc, acc_stride, column, 0, ahead);
  }
  for (; column + Math::kChunk <= tile.head_dim; column += Math::kChunk) {
    Math::template add_values<kRows, 1, false>(v_rows, tokens, p, rescale, acc, acc_stride, column, 0, ahead);
  }
  if (column < tile.head_dim) {
    const int part = tile.head_dim - column;
    Math::template add_values<kRows, 1, true>(v_rows, tokens, p, rescale, acc, acc_stride, column, part, ahead);
  }
}

template <class Math>
int packed_row_bytes(int head_dim) {
  return up_to_multiple(head_dim, Math::kPadding) * static_cast<int>(sizeof(typename Math::Product));
}

template <class Math>
int accumulator_stride(int head_dim) {
  return up_to_multiple(head_dim, Math::kPadding);
}

template <class Math, int kRows>
void attend_rows(const Tile& tile, int row, const char* const* k_rows, const char* const* v_rows, Ahead& ahead) {
  float* scores = reinterpret_cast<float*>(tile.scratch);
  auto* p = reinterpret_cast<typename Math::Product*>(tile.scratch + kScoreBytes);
  const int q_row_bytes = packed_row_bytes<Math>(tile.head_dim), stride = accumulator_stride<Math>(tile.head_dim);
  dot_products<Math, kRows>(tile, k_rows, tile.q + static_cast<int64_t>(row) * q_row_bytes, q_row_bytes, scores, ahead);
  float rescale[kRows];
  for (int r = 0; r < kRows; ++r) {
    rescale[r] = softmax_row<Math>(tile, row + r, scores + r * kTileTokens, p + r * kTileTokens);
  }
  add_all_values<Math, kRows>(tile, v_rows, p, rescale, tile.acc + static_cast<int64_t>(row) * stride, stride, ahead);
}

template <class Math>
void attend_all(const Tile& tile, const char* const* k_rows, const char* const* v_rows) {
  Ahead ahead(tile);
  int row = 0;
  for (; row + kBlockRows <= tile.num_rows; row += kBlockRows) {
    attend_rows<Math, kBlockRows>(tile, row, k_rows, v_rows, ahead);
  }
  const int left = tile.num_rows - row;
  if (left == 3) attend_rows<Math, 3>(tile, row, k_rows, v_rows, ahead);
  if (left == 2) attend_rows<Math, 2>(tile, row, k_rows, v_rows, ahead);
  if (left == 1) attend_rows<Math, 1>(tile, row, k_rows, v_rows, ahead);
}

template <class Math>
void attend(const Tile& tile) {
  attend_all<Math>(tile, tile.k_rows, tile.v_rows);
}

// FP8: few query rows convert as they load. With more, the tile is first widened to what Wide loads, once for all of
// them.
template <class Narrow, class Wide>
void attend_fp8(const Tile& tile) {
  if (tile.num_rows <= kBlockRows) return attend_all<Narrow>(tile, tile.k_rows, tile.v_rows);
  const int chunks = (tile.head_dim + Narrow::kChunk - 1) / Narrow::kChunk;
  const int wide_bytes = chunks * Narrow::kChunk * static_cast<int>(sizeof(typename Wide::Element));
  const int tokens = up_to_multiple(tile.num_tokens, Vec::kAccumulators);
  const char* k_rows[kTileTokens];
  const char* v_rows[kTileTokens];
  char* wide = tile.scratch + kWideOffset;
  const auto widen = [&](const char* row, const char*& wide_row) {
    for (int chunk = 0; chunk < chunks; ++chunk) {
      Narrow::store_wide(wide, chunk, Narrow::load(row, chunk, tile.head_dim - chunk * Narrow::kChunk));
    }
    wide_row = wide;
    wide += wide_bytes;
  };
  for (int t = 0; t < tokens; ++t) widen(tile.k_rows[t], k_rows[t]);
  for (int t = 0; t < tokens; ++t) widen(tile.v_rows[t], v_rows[t]);
  attend_all<Wide>(tile, k_rows, v_rows);
}

template <class Math, bool kFp8>
int scratch_bytes(int head_dim) {
  const int wide = up_to_multiple(head_dim, Math::kPadding) * static_cast<int>(sizeof(typename Math::Element));
  return kWideOffset + (kFp8 ? 2 * kTileTokens * wide : 0);
}

// Query rows as floats, padded with zeros.
template <class T>
void pack_query(const void* q_row, int head_dim, char* packed) {
  for (int d = 0; d < head_dim; d += Vec::kLanes) {
    Vec::store(reinterpret_cast<float*>(packed) + d,
               Vec::load_elements(static_cast<const T*>(q_row) + d, head_dim - d));
  }
}

template <class T>
void store_row(const float* acc, int head_dim, float factor, void* out) {
  for (int d = 0; d < head_dim; d += Vec::kLanes) {
    Vec::store_elements(static_cast<T*>(out) + d, Vec::mul(Vec::load(acc + d), Vec::all(factor)), head_dim - d);
  }
}

inline void store_partial_row(const float* acc, int head_dim, float factor, float* out) {
  store_row<float>(acc, head_dim, factor, out);
}

template <class T>
void round_row(const float* row, int head_dim, void* out) {
  for (int d = 0; d < head_dim; d += Vec::kLanes) {
    Vec::store_elements(static_cast<T*>(out) + d, Vec::load_elements(row + d, head_dim - d), head_dim - d);
  }
}

// Kernels of queries and outputs of type T with float arithmetic: KV of the same type, and FP8.
template <class T>
constexpr TileKernel float_kernel() {
  return {packed_row_bytes<FloatMath<T>>,
          accumulator_stride<FloatMath<T>>,
          scratch_bytes<FloatMath<T>, false>,
          pack_query<T>,
          attend<FloatMath<T>>,
          store_row<T>,
          store_partial_row,
          round_row<T>};
}

template <class T>
constexpr TileKernel float_fp8_kernel() {
  return {packed_row_bytes<FloatMath<float>>,
          accumulator_stride<FloatMath<float>>,
          scratch_bytes<FloatMath<float>, true>,
          pack_query<T>,
          attend_fp8<FloatMath<E4M3>, FloatMath<float>>,
          store_row<T>,
          store_partial_row,
          round_row<T>};
}

}  // namespace
}  // namespace attnops::xqa_decode::cpu
