#pragma once
#include "device/sm80/mma.cuh"
#include "device/sm90/wgmma.cuh"
#include "fmha/sm90/work.cuh"

namespace attnops::fmha::sm90 {

inline constexpr float kLog2E = 1.4426950408889634f;

// cap * tanh(x / cap) for x * log2(e) * 2 / cap given: exact to some 1e-7 of cap, where the unit's own tanh is not.
__device__ __forceinline__ float capped(float x, float cap, float two_over_cap_log2) {
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(exp2_approx(x * two_over_cap_log2) + 1.f));
  return cap - 2.f * cap * y;
}

// What two rows of a lane may see, and how far their softmax has come. The reference of a row moves only when a score
// exceeds it by kSlack powers of two (FlashAttention-4): accumulators are rarely rescaled, and stay far from overflow.
struct RowPair {
  static constexpr float kSlack = 8.f;
  int begin[2], end[2], token[2];
  float reference[2];  // in the units of the scores
  float sum[2];        // of this lane's columns

  __device__ __forceinline__ void start(const Params& p, const Schedule& s, const Work& w, int first_row) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int row = first_row + 8 * h;
      token[h] = min_of(row * s.pack_inverse >> 16, w.num_tokens - 1);
      const KeyRange keys = keys_at(p, static_cast<int64_t>(w.position) + token[h], w.seqlen_k);
      begin[h] = keys.begin;
      end[h] = keys.end;
      reference[h] = -INFINITY;
      sum[h] = 0.f;
    }
  }

  // Replaces scores of keys that a row may not see. `column`: key of scores[0].
  template <int kCount>
  __device__ __forceinline__ void mask(float (&scores)[kCount], const Params& p, const Work& w, int column) const {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const unsigned size = end[h] - begin[h];
      const int from = column - begin[h];
#pragma unroll
      for (int i = 0; i < kCount / 2; ++i) {
        float& score = scores[i / 2 * 4 + h * 2 + i % 2];
        if (static_cast<unsigned>(from + i / 2 * 8 + i % 2) >= size) score = -INFINITY;
      }
    }
    if (p.tree_mask == nullptr || column + 4 * kCount <= w.draft) return;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      uint32_t visible = 0;
#pragma unroll
      for (int i = 0; i < kCount / 2; ++i) {
        const int key = i / 2 * 8 + i % 2;
        if (key % 32 == 0) visible = tree_bits(p, w, w.first_token + token[h], column + key - w.draft);
        float& score = scores[i / 2 * 4 + h * 2 + i % 2];
        if (!(visible >> (key % 32) & 1)) score = -INFINITY;
      }
    }
  }

  // Scores become exp2((score - reference) * scale). Returns whether a reference has moved, and by which factors sums
  // and values shrink.
  template <int kCount>
  __device__ __forceinline__ bool exponentials(float (&scores)[kCount], float scale, float (&shrink)[2]) {
    bool moved = false;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      float largest = scores[h * 2];
#pragma unroll
      for (int i = 1; i < kCount / 2; ++i) largest = fmaxf(largest, scores[i / 2 * 4 + h * 2 + i % 2]);
      largest = fmaxf(largest, __shfl_xor_sync(0xffffffffu, largest, 1));
      largest = fmaxf(largest, __shfl_xor_sync(0xffffffffu, largest, 2));
      shrink[h] = 1.f;
      if ((largest - reference[h]) * scale > kSlack) {  // false for -inf less -inf
        shrink[h] = exp2_approx((reference[h] - largest) * scale);
        reference[h] = largest;
        moved = true;
      }
      const float offset = reference[h] == -INFINITY ? 0.f : -reference[h] * scale;
      float total = sum[h] * shrink[h];
#pragma unroll
      for (int i = 0; i < kCount / 2; ++i) {
        float& score = scores[i / 2 * 4 + h * 2 + i % 2];
        score = exp2_approx(fmaf(score, scale, offset));
        total += score;
      }
      sum[h] = total;
    }
    return __any_sync(0xffffffffu, moved);
  }

  // The sum over all columns of a row.
  __device__ __forceinline__ float total(int h) const {
    float all = sum[h] + __shfl_xor_sync(0xffffffffu, sum[h], 1);
    return all + __shfl_xor_sync(0xffffffffu, all, 2);
  }
};

}  // namespace attnops::fmha::sm90
