#pragma once
// Products of bf16 pairs (AVX-512-BF16) for kernel.h, which the including file has included on top of vec512.h.
//
// A register of <q, k> holds sums over pairs of neighbouring elements. For p * v two tokens' rows are interleaved, so
// that a pair is (token t, token t + 1) of one column, against the pair of their probabilities. Interleaving works
// within 128-bit lanes: a chunk's 32 columns leave it as columns 0-3, 8-11, .. and 4-7, 12-15, .., and the accumulators
// keep that order until `in_order` undoes it.
#include "xqa_decode/cpu/kernel.h"

namespace attnops::xqa_decode::cpu {
namespace {

constexpr int kPairs = 32;  // elements per register

// bf16 of the 128 magnitudes of e4m3, the last of which is NaN: low bytes, then high bytes.
struct E4M3Table {
  uint8_t low[128], high[128];
  constexpr E4M3Table() : low(), high() {
    for (int i = 0; i < 128; ++i) {
      const int top = i >= 4 ? 2 : i >= 2 ? 1 : 0;  // leading bit of a subnormal i / 8 * 2^-6
      const int value = i == 0    ? 0
                        : i < 8   ? ((127 - 9 + top) << 7) | ((i << (7 - top)) & 0x7F)
                        : i < 127 ? (i << 4) + (120 << 7)
                                  : 0x7FC0;
      low[i] = static_cast<uint8_t>(value & 0xFF);
      high[i] = static_cast<uint8_t>(value >> 8);
    }
  }
};
constexpr E4M3Table kE4M3Table;

// Neighbouring elements as bf16, in one register or two.
template <int kCount>
struct Registers {
  __m512i each[kCount];
};

// Up to 32 elements, zeros after the first `count`.
inline Registers<1> load_pairs(const BHalf* from, int count) {
  if (count >= kPairs) return {{_mm512_loadu_si512(from)}};
  return {{_mm512_maskz_loadu_epi16((__mmask32{1} << count) - 1, from)}};
}

// Up to 64 elements. Both bytes of each are looked up, then interleaved, which works within 128-bit lanes: so each lane
// has eight elements of the first register and eight of the second.
inline Registers<2> load_pairs(const E4M3* from, int count) {
  const __mmask64 used = count >= 2 * kPairs ? ~__mmask64{0} : (__mmask64{1} << count) - 1;
  const __m512i order = _mm512_setr_epi64(0, 4, 1, 5, 2, 6, 3, 7);
  const __m512i x = _mm512_permutexvar_epi64(order, _mm512_maskz_loadu_epi8(used, from));
  const __m512i low =
      _mm512_permutex2var_epi8(_mm512_loadu_si512(kE4M3Table.low), x, _mm512_loadu_si512(kE4M3Table.low + 64));
  const __m512i magnitude =
      _mm512_permutex2var_epi8(_mm512_loadu_si512(kE4M3Table.high), x, _mm512_loadu_si512(kE4M3Table.high + 64));
  const __m512i high = _mm512_ternarylogic_epi32(magnitude, x, _mm512_set1_epi8(static_cast<char>(0x80)),
                                                 0xF8);  // a | (b & c)
  return {{_mm512_unpacklo_epi8(low, high), _mm512_unpackhi_epi8(low, high)}};
}

// kPadding_: of packed queries and accumulators, where those of narrower elements are used, too.
template <class T, int kPadding_ = kPairs * 2 / static_cast<int>(sizeof(T))>
struct PairMath {
  using Element = T;
  using Product = BHalf;
  using Reg = Vec::Reg;
  static constexpr int kRegisters = 2 / static_cast<int>(sizeof(T));  // of a chunk
  static constexpr int kChunk = kPairs * kRegisters;
  static constexpr int kPadding = kPadding_;
  static constexpr int kTokenStep = 2;
  using Chunk = Registers<kRegisters>;

  static Chunk load(const char* row, int chunk, int count = kChunk) {
    return load_pairs(reinterpret_cast<const T*>(row) + chunk * kChunk, count);
  }
  static Chunk load_query(const char* row, int chunk) {
    Chunk q;
#pragma GCC unroll 2
    for (int i = 0; i < kRegisters; ++i) q.each[i] = _mm512_loadu_si512(row + 64 * (chunk * kRegisters + i));
    return q;
  }
  static void store_wide(char* row, int chunk, const Chunk& x) {
#pragma GCC unroll 2
    for (int i = 0; i < kRegisters; ++i) _mm512_storeu_si512(row + 64 * (chunk * kRegisters + i), x.each[i]);
  }
  static Reg dot(Reg sum, const Chunk& q, const Chunk& k) {
#pragma GCC unroll 2
    for (int i = 0; i < kRegisters; ++i) sum = _mm512_dpbf16_ps(sum, (__m512bh)q.each[i], (__m512bh)k.each[i]);
    return sum;
  }
  static void store_probabilities(BHalf* to, Reg p) {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), (__m256i)_mm512_cvtneps_pbh(p));
  }

  // kCount chunks of columns; two accumulators for each of their registers.
  template <int kRows, int kCount, bool kPart>
  static void add_values(const char* const* v_rows, int num_tokens, const BHalf* p, const float* rescale, float* acc,
                         int acc_stride, int column, int part, Ahead& ahead) {
    constexpr int kSums = 2 * kCount * kRegisters;
    Reg sum[kRows][kSums];
#pragma GCC unroll 4
    for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 4
      for (int c = 0; c < kSums; ++c) {
        sum[r][c] = Vec::mul(Vec::load(acc + r * acc_stride + column + c * Vec::kLanes), Vec::broadcast(rescale + r));
      }
    }
    for (int t = 0; t < num_tokens; t += 2) {
      ahead.fetch();
      __m512i v[kSums];
#pragma GCC unroll 2
      for (int c = 0; c < kCount; ++c) {
        const Chunk even = load(v_rows[t], column / kChunk + c, kPart ? part : kChunk);
        const Chunk odd = load(v_rows[t + 1], column / kChunk + c, kPart ? part : kChunk);
#pragma GCC unroll 2
        for (int i = 0; i < kRegisters; ++i) {
          v[2 * (c * kRegisters + i)] = _mm512_unpacklo_epi16(even.each[i], odd.each[i]);
          v[2 * (c * kRegisters + i) + 1] = _mm512_unpackhi_epi16(even.each[i], odd.each[i]);
        }
      }
#pragma GCC unroll 4
      for (int r = 0; r < kRows; ++r) {
        int pair;
        __builtin_memcpy(&pair, p + r * kTileTokens + t, sizeof(pair));
        const __m512i weights = _mm512_set1_epi32(pair);
#pragma GCC unroll 4
        for (int c = 0; c < kSums; ++c) {
          sum[r][c] = _mm512_dpbf16_ps(sum[r][c], (__m512bh)weights, (__m512bh)v[c]);
        }
      }
    }
#pragma GCC unroll 4
    for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 4
      for (int c = 0; c < kSums; ++c) Vec::store(acc + r * acc_stride + column + c * Vec::kLanes, sum[r][c]);
    }
  }
  static constexpr int kColumnRegisters = Vec::kColumns;
  static constexpr int kColumns = Vec::kLanes;
};

// Registers 2 c and 2 c + 1 of a row of accumulators as columns 32 c .. 32 c + 31 in their order.
inline void in_order(const float* acc, Vec::Reg& first, Vec::Reg& second) {
  const Vec::Reg low = Vec::load(acc), high = Vec::load(acc + Vec::kLanes);
  const __m512i to_first = _mm512_setr_epi32(0, 1, 2, 3, 16, 17, 18, 19, 4, 5, 6, 7, 20, 21, 22, 23);
  const __m512i to_second = _mm512_add_epi32(to_first, _mm512_set1_epi32(8));
  first = _mm512_permutex2var_ps(low, to_first, high);
  second = _mm512_permutex2var_ps(low, to_second, high);
}

template <class Math>
void pack_pair_query(const void* q_row, int head_dim, char* packed) {
  const auto* row = static_cast<const BHalf*>(q_row);
  for (int d = 0; d < up_to_multiple(head_dim, Math::kPadding); d += kPairs) {
    _mm512_storeu_si512(packed + 2 * d,
                        d < head_dim ? load_pairs(row + d, head_dim - d).each[0] : _mm512_setzero_si512());
  }
}

template <class T>
void store_pair_row(const float* acc, int head_dim, float factor, T* out) {
  for (int d = 0; d < head_dim; d += kPairs) {
    Vec::Reg first, second;
    in_order(acc + d, first, second);
    Vec::store_elements(out + d, Vec::mul(first, Vec::all(factor)), head_dim - d);
    if (head_dim - d > Vec::kLanes) {
      Vec::store_elements(out + d + Vec::kLanes, Vec::mul(second, Vec::all(factor)), head_dim - d - Vec::kLanes);
    }
  }
}

inline void store_pair_out(const float* acc, int head_dim, float factor, void* out) {
  store_pair_row(acc, head_dim, factor, static_cast<BHalf*>(out));
}

// KV of bfloat16, and FP8.
template <bool kFp8>
constexpr TileKernel pair_kernel() {
  using Narrow = PairMath<E4M3>;
  using Math = PairMath<BHalf, kFp8 ? Narrow::kPadding : kPairs>;
  return {packed_row_bytes<Math>,
          accumulator_stride<Math>,
          scratch_bytes<Math, kFp8>,
          pack_pair_query<Math>,
          kFp8 ? attend_fp8<Narrow, Math> : attend<Math>,
          store_pair_out,
          store_pair_row<float>,
          round_row<BHalf>};
}

}  // namespace
}  // namespace attnops::xqa_decode::cpu
