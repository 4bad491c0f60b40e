#pragma once
#include "device/sm90/wgmma_fp8.cuh"
#include "mla_decode/sm90/fp8_products/layout.h"
#include "mla_decode/sm90/fp8_products/queries.cuh"
#include "mla_decode/sm90/softmax.cuh"

// The softmax of a 64 x 64 tile of scores, in two halves: the reference maximum, which the other group waits for, and
// then the probabilities.
namespace attnops::mla_decode::sm90::fp8_products {

// Probabilities are multiplied by 2^kLift, which a row sum undoes: e4m3 then has room on both sides. The exponentials
// are computed under the references as they are, which may lie below the maxima; only a thread's sum of a row shows
// whether one may exceed e4m3's largest value. Then the references rise to the maxima and all is computed again;
// sixteen probabilities are 256 at most after that.
inline constexpr float kLift = 4.f;
inline constexpr float kMostSum = 448.f;
inline constexpr float kUnset = -1e30f;  // of a row that saw no key yet: below every score

// What is left to multiply the scores of a thread's rows by, a positive number; the soft cap is applied here, and
// masks. Common calls: keys before `seen_by_all` are seen by all rows.
struct ScoreScale {
  float row[kRowsPerThread];  // of raw scores, to the base-2 logarithm
};

template <Options kOptions>
__device__ inline ScoreScale prepare_scores(const Params& p, const Piece& piece, const RowState& rows,
                                            const ScoreScale& raw, int seen_by_all, int first_key, float (&s)[32]) {
  ScoreScale left = raw;
  if (kOptions == Options::kAll && p.logit_cap > 0.f) {
    const float cap = p.logit_cap * kLog2e, inner = kLn2 / p.logit_cap;
#pragma unroll
    for (int i = 0; i < 32; ++i) s[i] = soft_capped(s[i] * raw.row[i / 2 % 2] * inner, cap);
    left.row[0] = left.row[1] = 1.f;
  }
  if constexpr (kOptions == Options::kAll) {
    mask_tile(p, piece, rows, first_key, s);
  } else if (first_key + kPlanTileTokens > seen_by_all) {
    mask_end(rows, first_key, s);
  }
  return left;
}

// The references rise to the maxima where these are above them; `factor` is what everything accumulated must be
// multiplied by.
__device__ inline void raise_references(RowState& rows, const ScoreScale& scale, const float (&s)[32],
                                        float (&factor)[kRowsPerThread]) {
#pragma unroll
  for (int h = 0; h < kRowsPerThread; ++h) {
    float top = s[2 * h];
#pragma unroll
    for (int i = 0; i < 16; ++i) top = fmaxf(top, s[4 * (i / 2) + 2 * h + i % 2]);
    const float before = rows.maximum[h], after = fmaxf(before, scale.row[h] * quad_max(top));
    factor[h] = before == kUnset ? 1.f : rescale_factor(before, after);
    rows.maximum[h] = after;
    rows.sum[h] *= factor[h];
  }
}

// Probabilities of a thread's two rows as e4m3, by 16 keys. Of these, the thread has 2t, 2t + 1, 8 + 2t, 8 + 2t + 1,
// which are bytes 4t .. 4t + 3: V's transposed fragments have the same order.
using Words = uint32_t[kRowsPerThread][4];

// Scores to probabilities under the references, and their sums.
__device__ inline void exponentiate(const RowState& rows, const ScoreScale& scale, const float (&s)[32], Words& words,
                                    float (&sums)[kRowsPerThread]) {
  const float reference[kRowsPerThread] = {rows.maximum[0] - kLift, rows.maximum[1] - kLift};
  float parts[kRowsPerThread][2] = {};
#pragma unroll
  for (int m = 0; m < 4; ++m) {
#pragma unroll
    for (int h = 0; h < kRowsPerThread; ++h) {
      float x[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        x[i] = exp2_fast(fmaf(s[8 * m + 4 * (i / 2) + 2 * h + i % 2], scale.row[h], -reference[h]));
      }
      parts[h][0] += x[0] + x[1];
      parts[h][1] += x[2] + x[3];
      words[h][m] = attnops::sm90::pack_e4m3(x[0], x[1]) | attnops::sm90::pack_e4m3(x[2], x[3]) << 16;
    }
  }
#pragma unroll
  for (int h = 0; h < kRowsPerThread; ++h) sums[h] = parts[h][0] + parts[h][1];
}

// Rows of 64 keys.
__device__ inline void store_probabilities(const Words& words, uint32_t tile) {
  // Matrices of a store: rows 0 .. 7 and 8 .. 15 of two chunks.
  const int lane = threadIdx.x % 32, row = threadIdx.x % kGroupThreads / 32 * 16 + lane % 16;
#pragma unroll
  for (int m = 0; m < 4; m += 2) {
    const uint32_t a[4] = {words[0][m], words[1][m], words[0][m + 1], words[1][m + 1]};
    attnops::sm90::store_fragment(a, tile + swizzled_half(row, m + lane / 16));
  }
}

}  // namespace attnops::mla_decode::sm90::fp8_products
