#pragma once
#include "device/sm90/wgmma_fp8.cuh"
#include "mla_decode/sm90/fp8_products/layout.h"
#include "mla_decode/sm90/fp8_products/queries.cuh"
#include "mla_decode/sm90/softmax.cuh"

// The softmax of a 64 x 64 tile of scores, in two halves: the reference maximum, which the other group waits for, and
// then the probabilities.
namespace attnops::mla_decode::sm90::fp8_products {

// Probabilities are multiplied by 2^kLift, which a row sum undoes: e4m3 then has room on both sides. They stay below
// 448, its largest value, although the reference maximum is up to 2^kLag behind.
inline constexpr float kLift = 4.f;
inline constexpr float kLag = 4.75f;

// What is left to multiply the scores of a thread's rows by, a positive number; the soft cap is applied here, and
// masks.
struct ScoreScale {
  float row[kRowsPerThread];  // of raw scores, to the base-2 logarithm
};

template <Options kOptions>
__device__ inline ScoreScale prepare_scores(const Params& p, const Piece& piece, const RowState& rows,
                                            const ScoreScale& raw, int first_key, float (&s)[32]) {
  ScoreScale left = raw;
  if (kOptions == Options::kAll && p.logit_cap > 0.f) {
    const float cap = p.logit_cap * kLog2e, inner = kLn2 / p.logit_cap;
#pragma unroll
    for (int i = 0; i < 32; ++i) s[i] = soft_capped(s[i] * raw.row[i / 2 % 2] * inner, cap);
    left.row[0] = left.row[1] = 1.f;
  }
  if constexpr (kOptions == Options::kAll) {
    mask_tile(p, piece, rows, first_key, s);
  } else {
    mask_end(rows, first_key, s);
  }
  return left;
}

// Moves the reference maxima if they must be; `factor` is what everything accumulated must be multiplied by.
__device__ inline void move_maximum(RowState& rows, const ScoreScale& scale, const float (&s)[32],
                                    float (&factor)[kRowsPerThread]) {
#pragma unroll
  for (int h = 0; h < kRowsPerThread; ++h) {
    float tops[4];
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      tops[j] =
          fmaxf(fmaxf(s[4 * j + 2 * h], s[4 * j + 2 * h + 1]), fmaxf(s[4 * j + 16 + 2 * h], s[4 * j + 17 + 2 * h]));
    }
    const float top = scale.row[h] * quad_max(fmaxf(fmaxf(tops[0], tops[1]), fmaxf(tops[2], tops[3])));
    const float before = rows.maximum[h];
    const float after = top > before + kLag ? top : before;
    factor[h] = rescale_factor(before, after);
    rows.maximum[h] = after;
    rows.sum[h] *= factor[h];
  }
}

// Scores to probabilities; adds them to the row sums.
__device__ inline void exponentiate(RowState& rows, const ScoreScale& scale, float (&s)[32]) {
#pragma unroll
  for (int h = 0; h < kRowsPerThread; ++h) {
    const float reference = (rows.maximum[h] == -INFINITY ? 0.f : rows.maximum[h]) - kLift;
    float sums[4] = {};
#pragma unroll
    for (int j = 0; j < 8; ++j) {
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        float& x = s[4 * j + 2 * h + e];
        x = exp2_fast(fmaf(x, scale.row[h], -reference));
        sums[(2 * j + e) % 4] += x;
      }
    }
    rows.sum[h] += (sums[0] + sums[1]) + (sums[2] + sums[3]);
  }
}

// Writes probabilities as e4m3, rows of 64 keys. Of 16 keys, the thread has 2t,
// 2t + 1, 8 + 2t, 8 + 2t + 1 and writes them as bytes 4t .. 4t + 3: V's transposed fragments have the same order.
__device__ inline void store_probabilities(const float (&s)[32], uint32_t tile) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x % kGroupThreads / 32;
  uint32_t words[2][4];  // by row, and 16 keys
#pragma unroll
  for (int m = 0; m < 4; ++m) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      words[h][m] = attnops::sm90::pack_e4m3(s[8 * m + 2 * h], s[8 * m + 2 * h + 1]) |
                    attnops::sm90::pack_e4m3(s[8 * m + 4 + 2 * h], s[8 * m + 5 + 2 * h]) << 16;
    }
  }
  // Matrices of a store: rows 0 .. 7 and 8 .. 15 of two chunks.
  const int row = warp * 16 + lane % 16;
#pragma unroll
  for (int m = 0; m < 4; m += 2) {
    const uint32_t a[4] = {words[0][m], words[1][m], words[0][m + 1], words[1][m + 1]};
    attnops::sm90::store_fragment(a, tile + swizzled_half(row, m + lane / 16));
  }
}

}  // namespace attnops::mla_decode::sm90::fp8_products
