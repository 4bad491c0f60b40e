#pragma once
#include <cmath>

#include "core/math.h"
#include "mla_decode/sm90/layout.h"
#include "mla_decode/sm90/pieces.cuh"

// The softmax of one 64 x 64 tile of scores. In a wgmma accumulator a thread holds two rows, lane / 4 and lane / 4 + 8
// of its warp's sixteen, and of each the columns 8 j + 2 (lane % 4) + {0, 1}.
namespace attnops::mla_decode::sm90 {

inline constexpr int kRowsPerThread = 2;

// The reference maximum follows the true one only when that is more than 2^kSlack above it: exact all the same, since
// numerator and denominator share the reference, and the accumulators are then hardly ever rescaled.
inline constexpr float kSlack = 8.f;

__device__ inline float exp2_fast(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// What multiplies everything accumulated under the maximum `before` when the maximum becomes `after`. Nothing has been
// accumulated before the first maximum: one does as well as zero, and spares the first tile the multiplications.
__device__ inline float rescale_factor(float before, float after) {
  return before == after || before == -INFINITY ? 1.f : exp2_fast(before - after);
}

__device__ inline float quad_max(float x) {
  x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, 1));
  return fmaxf(x, __shfl_xor_sync(0xffffffffu, x, 2));
}

__device__ inline float quad_sum(float x) {
  x += __shfl_xor_sync(0xffffffffu, x, 1);
  return x + __shfl_xor_sync(0xffffffffu, x, 2);
}

// cap * tanh(x): the quotient loses no precision where the cap is felt.
__device__ inline float soft_capped(float x, float cap) {
  return cap * (1.f - __fdividef(2.f, 1.f + exp2_fast(2.f * kLog2e * x)));
}

// The two query rows of a thread: which keys they see, and their running state, in the base-2 logarithm.
struct RowState {
  int token[kRowsPerThread];
  KvRange keys[kRowsPerThread];
  float maximum[kRowsPerThread];
  float sum[kRowsPerThread];  // of this thread's columns, of this group's tiles
  float top[kRowsPerThread];  // of lists: the largest score of this group's tiles, in the base-2 logarithm
  int group[kRowsPerThread];  // kMasked: of heads

  template <Options kOptions = Options::kAll>
  __device__ void begin(const Params& p, const Piece& piece) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x % kGroupThreads / 32;
#pragma unroll
    for (int h = 0; h < kRowsPerThread; ++h) {
      const int row =
          min_of(warp * 16 + lane / 4 + 8 * h, piece.num_rows - 1);  // spare rows see what the last one sees
      token[h] = row_place(p, piece.first_row + row).token;
      const int position = piece.length - p.seqlen_q + token[h];
      const bool causal = p.causal && (kOptions == Options::kCommon || p.tree_mask == nullptr);
      const int end = causal ? max_of(position + 1, 0) : piece.length;
      const int window = window_of<kOptions>(p);
      keys[h].begin = window < 0    ? 0
                      : p.tree_mask ? draft_window_begin(p, piece.request, token[h], piece.length - p.tree_keys)
                                    : max_of(position - window, 0);
      keys[h].end = min_of(end, piece.keys.end);
      maximum[h] = -INFINITY;
      sum[h] = 0.f;
      if constexpr (selects(kOptions)) top[h] = -INFINITY;
      if constexpr (kOptions == Options::kMasked) group[h] = min_of(row / HeadMasks(p).of_group, kMostHeadGroups - 1);
    }
  }
};

__device__ inline uint64_t bits_below(int count) {
  return count >= 64 ? ~uint64_t{0} : count <= 0 ? 0 : (uint64_t{1} << count) - 1;
}

// The drafts among the keys [first_key, first_key + 64) that the tree hides from query token `token`.
__device__ inline uint64_t hidden_by_tree(const Params& p, const Piece& piece, int token, int first_key) {
  const uint8_t* row = p.tree_mask + piece.request * p.tree_mask_stride_request + token * p.tree_mask_stride_token;
  const int first_draft = piece.length - p.tree_keys, ahead = max_of(first_draft - first_key, 0);
  const int first_bit = max_of(first_key - first_draft, 0), inside = first_bit % 8;
  row += first_bit / 8;
  const int bytes = min_of((p.tree_keys + 7) / 8 - first_bit / 8, kPlanTileTokens / 8 + 1);
  uint64_t seen = 0;
#pragma unroll 1
  for (int i = 0; i < bytes; ++i) {
    const uint64_t byte = row[i];
    seen |= i == 0 ? byte >> inside : byte << 1 << (8 * i - inside - 1);
  }
  return ~(seen << ahead) & ~bits_below(ahead);
}

// Checked mode: the keys whose pages do not exist. The loading group reports them.
__device__ inline uint64_t hidden_by_pages(const Params& p, const Piece& piece, int first_key) {
  const int32_t* cells = p.page_table.row(piece.request);
  uint64_t hidden = 0;
#pragma unroll 1
  for (int k = 0; k < kPlanTileTokens; ++k) {
    const int key = first_key + k;
    if (key < piece.keys.begin || key >= piece.keys.end) continue;
    const int page = cells[key / p.page_table.page_size];
    if (!p.page_table.has_page(page)) hidden |= uint64_t{1} << k;
  }
  return hidden;
}

// The same where a row sees all keys up to an end: a comparison a score.
__device__ inline void mask_end(const RowState& rows, int first_key, float (&s)[32]) {
  const int first = first_key + 2 * (threadIdx.x % 4);
  const bool inside =
      rows.keys[0].end >= first_key + kPlanTileTokens && rows.keys[1].end >= first_key + kPlanTileTokens;
  if (__all_sync(0xffffffffu, inside)) return;
#pragma unroll
  for (int h = 0; h < kRowsPerThread; ++h) {
    const int seen = rows.keys[h].end - first;
#pragma unroll
    for (int i = 0; i < 16; ++i) {
      float& x = s[4 * (i / 2) + 2 * h + i % 2];
      if (8 * (i / 2) + i % 2 >= seen) x = -INFINITY;
    }
  }
}

// Removes what the rows do not see from the scores of keys [first_key, first_key + 64).
__device__ inline void mask_tile(const Params& p, const Piece& piece, const RowState& rows, int first_key,
                                 float (&s)[32]) {
  const bool has_drafts = p.tree_mask && first_key + kPlanTileTokens > piece.length - p.tree_keys;
  bool inside = true;
#pragma unroll
  for (int h = 0; h < kRowsPerThread; ++h) {
    inside &= rows.keys[h].begin <= first_key && rows.keys[h].end >= first_key + kPlanTileTokens;
  }
  if (__all_sync(0xffffffffu, inside) && !has_drafts && !p.report) return;

  const uint64_t lost = p.report ? hidden_by_pages(p, piece, first_key) : 0;
#pragma unroll
  for (int h = 0; h < kRowsPerThread; ++h) {
    uint64_t seen = bits_below(rows.keys[h].end - first_key) & ~bits_below(rows.keys[h].begin - first_key) & ~lost;
    if (has_drafts) seen &= ~hidden_by_tree(p, piece, rows.token[h], first_key);
    seen >>= 2 * (threadIdx.x % 4);
#pragma unroll
    for (int j = 0; j < 8; ++j) {
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        if (!(seen >> (8 * j + e) & 1)) s[4 * j + 2 * h + e] = -INFINITY;
      }
    }
  }
}

// Of a list of rows: removes the keys that are not in `seen`.
__device__ inline void mask_unlisted(uint64_t seen, float (&s)[32]) {
  if (seen == ~uint64_t{0}) return;
  seen >>= 2 * (threadIdx.x % 4);
#pragma unroll
  for (int j = 0; j < 8; ++j) {
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      if (seen >> (8 * j + e) & 1) continue;
#pragma unroll
      for (int h = 0; h < kRowsPerThread; ++h) s[4 * j + 2 * h + e] = -INFINITY;
    }
  }
}

// Which keys of a tile the rows of a thread see.
struct RowKeys {
  uint64_t of[kRowsPerThread];
};

__device__ inline void mask_unlisted(const RowKeys& seen, float (&s)[32]) {
#pragma unroll
  for (int h = 0; h < kRowsPerThread; ++h) {
    const uint64_t keys = seen.of[h] >> 2 * (threadIdx.x % 4);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const auto word = static_cast<uint32_t>(keys >> 32 * half);
#pragma unroll
      for (int j = 0; j < 4; ++j) {
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          float& x = s[16 * half + 4 * j + 2 * h + e];
          x = word & 1u << (8 * j + e) ? x : -INFINITY;
        }
      }
    }
  }
}

// The largest of the thread's scores of its row h.
__device__ inline float row_top(const float (&s)[32], int h) {
  float tops[4];
#pragma unroll
  for (int j = 0; j < 4; ++j) {
    tops[j] = fmaxf(fmaxf(s[4 * j + 2 * h], s[4 * j + 2 * h + 1]), fmaxf(s[4 * j + 16 + 2 * h], s[4 * j + 17 + 2 * h]));
  }
  return fmaxf(fmaxf(tops[0], tops[1]), fmaxf(tops[2], tops[3]));
}

// Turns scores into probabilities under the rows' reference maximum, which it may move; `factor` is then what the
// accumulator must be multiplied by. `top(h)`: the largest of row h, in the base-2 logarithm; `scale`: what is left to
// multiply a score by. `halfway` runs between the rows' exponentials: what is in flight under the softmax is done by
// then, and what it read can be given back before the softmax ends.
template <class Top, class Halfway>
__device__ inline void take_exponentials(RowState& rows, float scale, const Top& top, float (&s)[32],
                                         float (&factor)[kRowsPerThread], const Halfway& halfway) {
  float reference[kRowsPerThread];
#pragma unroll
  for (int h = 0; h < kRowsPerThread; ++h) {
    const float largest = top(h), before = rows.maximum[h];
    const float after = largest > before + kSlack ? largest : before;
    factor[h] = rescale_factor(before, after);
    rows.maximum[h] = after;
    reference[h] = after == -INFINITY ? 0.f : after;
  }
#pragma unroll
  for (int h = 0; h < kRowsPerThread; ++h) {
    if (h == 1) halfway();
    float sums[4] = {};
#pragma unroll
    for (int j = 0; j < 8; ++j) {
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        float& x = s[4 * j + 2 * h + e];
        x = exp2_fast(fmaf(x, scale, -reference[h]));
        sums[(2 * j + e) % 4] += x;
      }
    }
    rows.sum[h] = rows.sum[h] * factor[h] + ((sums[0] + sums[1]) + (sums[2] + sums[3]));
  }
}

// Of a tile of a request's keys, from raw scores on.
template <Options kOptions = Options::kAll, class Halfway>
__device__ inline void softmax_tile(const Params& p, const Piece& piece, RowState& rows, int first_key, float (&s)[32],
                                    float (&factor)[kRowsPerThread], const Halfway& halfway) {
  static_assert(!selects(kOptions));
  // A positive scale commutes with the maximum and joins the exponent's subtraction.
  float scale = p.softmax_scale * kLog2e;
  if (kOptions != Options::kCommon && (p.logit_cap > 0.f || scale <= 0.f)) {
    const float cap = p.logit_cap * kLog2e, inner = p.logit_cap > 0.f ? p.softmax_scale / p.logit_cap : 0.f;
#pragma unroll
    for (int i = 0; i < 32; ++i) s[i] = p.logit_cap > 0.f ? soft_capped(s[i] * inner, cap) : s[i] * scale;
    scale = 1.f;
  }
  if constexpr (kOptions == Options::kAll) {
    mask_tile(p, piece, rows, first_key, s);
  } else {
    mask_end(rows, first_key, s);
  }
  take_exponentials(rows, scale, [&](int h) { return scale * quad_max(row_top(s, h)); }, s, factor, halfway);
}

// The same of lists in two steps. First what needs scores alone: `top` and `scale`, which is returned.
template <class Seen>
__device__ inline float listed_tops(const Params& p, const Seen& seen, float (&s)[32], float (&top)[kRowsPerThread]) {
  float scale = p.softmax_scale * kLog2e;
  if (scale <= 0.f) {
#pragma unroll
    for (int i = 0; i < 32; ++i) s[i] *= scale;
    scale = 1.f;
  }
  mask_unlisted(seen, s);
#pragma unroll
  for (int h = 0; h < kRowsPerThread; ++h) top[h] = scale * quad_max(row_top(s, h));
  return scale;
}

// Then the exponentials.
template <class Halfway>
__device__ inline void listed_exponentials(RowState& rows, float scale, const float (&top)[kRowsPerThread],
                                           float (&s)[32], float (&factor)[kRowsPerThread], const Halfway& halfway) {
  const auto keep_top = [&](int h) { return rows.top[h] = fmaxf(rows.top[h], top[h]), top[h]; };
  take_exponentials(rows, scale, keep_top, s, factor, halfway);
}

// Takes over the reference maximum that the other group has moved to; `factor` as above.
__device__ inline void follow_maximum(RowState& rows, const float* maxima, float (&factor)[kRowsPerThread]) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x % kGroupThreads / 32;
#pragma unroll
  for (int h = 0; h < kRowsPerThread; ++h) {
    const float after = maxima[warp * 16 + lane / 4 + 8 * h];
    factor[h] = rescale_factor(rows.maximum[h], after);
    rows.maximum[h] = after;
    rows.sum[h] *= factor[h];
  }
}

__device__ inline void publish_maximum(const RowState& rows, float* maxima) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x % kGroupThreads / 32;
  if (lane % 4 != 0) return;
#pragma unroll
  for (int h = 0; h < kRowsPerThread; ++h) maxima[warp * 16 + lane / 4 + 8 * h] = rows.maximum[h];
}

}  // namespace attnops::mla_decode::sm90
