#pragma once
#include "mla_decode/sm90/fp8_fragments/softmax.cuh"
#include "mla_decode/sm90/fp8_fragments/wide_layout.h"

namespace attnops::mla_decode::sm90::fp8_fragments {

using attnops::sm90::named_barrier_sync;

// The softmax of a transposed tile of scores by one warpgroup, [64 keys, 64 queries]: element 4 j + 2 h + e is key
// key_of(h) and query 8 j + 2 (lane % 4) + e. The reference maxima lie in shared memory.
template <class At>
class WideSoftmax {
 public:
  static constexpr int kCount = At::kRows / 4;
  using Scores = float[At::kRows / 2];
  // Rows' scales and references are held from the end of a tile's scores on, where there are registers: keys' scales
  // take those.
  static constexpr bool kHolds = !At::kScaled && At::kRows >= 48;
  using RowPairs = float4[kHolds ? At::kRows / 8 : 1];

  __device__ WideSoftmax(const Params& p, uint8_t* base) : p_(p), base_(base) {}

  // What needs neither the piece's queries nor that all have left the one before, but for a barrier in its last tile.
  __device__ void begin(const Piece& piece) {
    clear_ = few_rows::keys_of_all_rows(p_, piece);
    const int row = threadIdx.x % kGroupThreads;
    if (row < At::kRows) reinterpret_cast<int*>(base_ + At::kSeenEnds)[row] = seen_end(piece, row);
#pragma unroll
    for (float& x : sum_) x = 0.f;
  }

  // When they are there; ends with a barrier.
  __device__ void take_scales() {
    const float raw_scale = this->raw_scale();
    const bool scales_first = this->scales_first(raw_scale);
    const int row = threadIdx.x % kGroupThreads;
    bool is_bad = false;
    if (row < At::kRows) {
      const float own = query_scale(row);
      is_bad = isnan(own);
      float* pair = pair_entry(row);
      pair[0] = scales_first ? 1.f : (is_bad ? 1.f : own) * raw_scale;  // times it, -infinity must stay what it is
      pair[1] = kUnset;
    }
    special_ = attnops::sm90::named_barrier_or(kScoreWarps, kGroupThreads, is_bad || scales_first);
  }

  // Of the thread's rows, for the next tile.
  __device__ void load(RowPairs& pairs) const {
    if constexpr (kHolds) {
#pragma unroll
      for (int j = 0; j < At::kRows / 8; ++j) pairs[j] = pair_of(j);
    }
  }

  // Masks the raw scores of keys [first_key, first_key + 64) and moves the reference maxima where it must: says so, and
  // leaves the factors of what was accumulated before in `factors`. Where keys have scales, `weight` is the base-2
  // logarithm of the largest of a key: softmax.cuh.
  __device__ bool prepare(const Piece& piece, int first_key, Scores& s, const float (&weight)[2], RowPairs& pairs,
                          float* factors, uint32_t listed) {
    if constexpr (At::kOptions == Options::kSelected) {
      if (special_) scale_or_spoil(s);
      mask_unlisted<At, kCount>(listed, s);
    } else {
      const bool some_masked = (At::kOptions == Options::kAll && (first_key < clear_.begin || p_.report)) ||
                               first_key + kPlanTileTokens > clear_.end;
      if (special_ || some_masked) {  // what is rare behind one branch: each costs registers of every tile
        if (special_) scale_or_spoil(s);
        if (some_masked) mask(piece, first_key, s);
      }
    }
    // The largest exponent: by maxima, for a chain of predicates takes longer than all else here.
    constexpr int kTops = min_of(4, At::kRows / 8);
    float tops[kTops];
#pragma unroll
    for (int j = 0; j < At::kRows / 8; ++j) {
      const float4 pair = kHolds ? pairs[j % kHeld] : pair_of(j);
      const float most = fmaxf(top(s, j, 0, pair.x, weight) - pair.y, top(s, j, 1, pair.z, weight) - pair.w);
      tops[j % kTops] = j < kTops ? most : fmaxf(tops[j % kTops], most);
    }
    float most = fmaxf(tops[0], tops[1]);
    if constexpr (kTops == 4) most = fmaxf(most, fmaxf(tops[2], tops[3]));
    const bool above = most > kLift + kSlack;
    const bool moved = attnops::sm90::named_barrier_or(kScoreWarps, kGroupThreads, above);
    if (moved) {
      move_references(s, weight, factors);
      load(pairs);
    }
    return moved;
  }

  // Prepared scores to probabilities: of the thread's rows 8 j + 2 (lane % 4) + {0, 1}.
  __device__ void exponentiate(int j, const RowPairs& pairs, Scores& s) {
    const float4 pair = kHolds ? pairs[j % kHeld] : pair_of(j);
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      float &x = s[4 * j + 2 * h], &y = s[4 * j + 2 * h + 1];
      x = exp2_fast(fmaf(x, pair.x, -pair.y));
      y = exp2_fast(fmaf(y, pair.z, -pair.w));
      sum_[2 * j] += x;
      sum_[2 * j + 1] += y;
    }
  }

  // Leaves the sums of each warp and the references in shared memory: of the next piece elsewhere, for these are read
  // when that one has begun.
  __device__ void publish(int parity) const {
    float* totals = reinterpret_cast<float*>(base_ + At::totals(parity));
    float* sums = totals + warp() * At::kRows;
    const int row = threadIdx.x % kGroupThreads;
    if (row < At::kRows) totals[4 * At::kRows + row] = pair_entry(row)[1];
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      const float sum = column_sum(sum_[i]);
      if (threadIdx.x % 32 < 4) sums[query_of(i)] = sum;
    }
  }

 private:
  static constexpr int kHeld = kHolds ? At::kRows / 8 : 1;
  static constexpr float kUnset = -1e30f;  // of a row that saw no key yet: below every score

  __device__ static int warp() { return threadIdx.x % kGroupThreads / 32; }

  // Of two neighbouring rows: what their raw scores are multiplied by, and then subtracted: reference - kLift.
  __device__ float4 pair_of(int j) const {
    return reinterpret_cast<const float4*>(base_ + At::kRowPairs)[4 * j + threadIdx.x % 4];
  }
  __device__ float* pair_entry(int row) const {
    return reinterpret_cast<float*>(base_ + At::kRowPairs) + row / 2 * 4 + row % 2 * 2;
  }
  __device__ float query_scale(int row) const { return reinterpret_cast<const float*>(base_ + At::kQueryScale)[row]; }

  // Only a positive scale commutes with the maximum, and a soft cap needs scaled scores.
  __device__ bool capped() const { return At::kOptions == Options::kAll && p_.logit_cap > 0.f; }
  __device__ bool scales_first(float raw_scale) const { return capped() || raw_scale <= 0.f; }
  __device__ float raw_scale() const { return p_.softmax_scale * (p_.kv_scale ? *p_.kv_scale : 1.f) * kLog2e; }

  // The larger of a query's two scores; where keys have scales, of its probabilities times the largest of those.
  __device__ static float top(const Scores& s, int j, int e, float scale, const float (&weight)[2]) {
    if constexpr (!At::kScaled) return fmaxf(s[4 * j + e], s[4 * j + 2 + e]) * scale;
    return fmaxf(fmaf(s[4 * j + e], scale, weight[0]), fmaf(s[4 * j + 2 + e], scale, weight[1]));
  }

  __device__ void scale_or_spoil(Scores& s) const {
    const float raw_scale = this->raw_scale();
    if (scales_first(raw_scale)) scale(raw_scale, s);
    spoil(s);
  }

  __device__ void scale(float raw_scale, Scores& s) const {
    const float cap = p_.logit_cap * kLog2e, inner = capped() ? kLn2 / p_.logit_cap : 0.f;
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      const float by = query_scale(query_of(i)) * raw_scale;
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        float& x = s[element_of(i, h)];
        x = capped() ? soft_capped(x * by * inner, cap) : x * by;
      }
    }
  }

  // Rows whose query is not finite show it wherever they see a key, and only there.
  __device__ void spoil(Scores& s) const {
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      if (isnan(query_scale(query_of(i)))) s[element_of(i, 0)] = s[element_of(i, 1)] = NAN;
    }
  }

  __device__ void mask(const Piece& piece, int first_key, Scores& s) const {
    if constexpr (At::kOptions == Options::kCommon) {
      mask_ends(first_key, s);
    } else if (few_rows::sees_to_an_end(p_)) {
      mask_ends(first_key, s);
    } else {
      mask_each(piece, first_key, s);
    }
  }

  // Past the last key that a row of the piece sees, where it sees all before it. Spare rows see what the last one sees.
  __device__ int seen_end(const Piece& piece, int row) const {
    if (!p_.causal) return piece.keys.end;
    const int token = row_place(p_, piece.first_row + min_of(row, piece.num_rows - 1)).token;
    return min_of(piece.length - p_.seqlen_q + 1 + token, piece.keys.end);
  }

  __device__ void mask_ends(int first_key, Scores& s) const {
    const int2* ends = reinterpret_cast<const int2*>(base_ + At::kSeenEnds) + threadIdx.x % 4;
    const int key = first_key + key_of(0);
#pragma unroll
    for (int j = 0; j < At::kRows / 8; ++j) {
      const int2 end = ends[4 * j];
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        if (key + 8 * h >= end.x) s[4 * j + 2 * h] = -INFINITY;
        if (key + 8 * h >= end.y) s[4 * j + 2 * h + 1] = -INFINITY;
      }
    }
  }

  __device__ void mask_each(const Piece& piece, int first_key, Scores& s) const {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int key = first_key + key_of(h);
      const bool there = p_.report == nullptr || few_rows::has_page(p_, piece, key);
      uint32_t seen = 0;  // a bit per query, by a loop that is small: most tiles need none
#pragma unroll 1
      for (int i = 0; i < kCount; ++i) {
        const int row = min_of(query_of(i), piece.num_rows - 1);  // spare rows see what the last one sees
        const int token = row_place(p_, piece.first_row + row).token;
        seen |= static_cast<uint32_t>(there && few_rows::sees(p_, piece, token, key)) << i;
      }
#pragma unroll
      for (int i = 0; i < kCount; ++i) {
        if (!(seen >> i & 1)) s[element_of(i, h)] = -INFINITY;
      }
    }
  }

  // Takes the maxima of all warps; a reference follows where they are too far above it.
  __device__ void move_references(const Scores& s, const float (&weight)[2], float* factors) {
    float* maxima = reinterpret_cast<float*>(base_ + At::kMaxima);
#pragma unroll
    for (int j = 0; j < At::kRows / 8; ++j) {
      const float4 pair = pair_of(j);
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        const float most = column_max(top(s, j, e, e == 0 ? pair.x : pair.z, weight));
        if (threadIdx.x % 32 < 4) maxima[warp() * At::kRows + query_of(2 * j + e)] = most;
      }
    }
    named_barrier_sync(kScoreWarps, kGroupThreads);
    const int row = threadIdx.x % kGroupThreads;
    if (row < At::kRows) {
      float most = kUnset;
#pragma unroll
      for (int w = 0; w < 4; ++w) most = fmaxf(most, maxima[w * At::kRows + row]);
      float* pair = pair_entry(row);
      const float before = pair[1], after = most - kLift > before + kSlack ? most - kLift : before;
      pair[1] = after;
      factors[row] = rescale_factor(before, after);
    }
    named_barrier_sync(kScoreWarps, kGroupThreads);
#pragma unroll
    for (int i = 0; i < kCount; ++i) sum_[i] *= factors[query_of(i)];
  }

  const Params& p_;
  uint8_t* const base_;
  KvRange clear_;  // keys that need no mask
  bool special_;   // some of the piece's queries are not finite, or scores are scaled ahead of their maximum
  float sum_[kCount];
};

}  // namespace attnops::mla_decode::sm90::fp8_fragments
