#pragma once
#include "device/sm80/mma.cuh"
#include "fmha/cuda/places.cuh"

namespace attnops::fmha {

// cap * tanh(x / cap) for x * log2(e) * 2 / cap given: exact to some 1e-7 of cap, where the unit's own tanh is not.
__device__ __forceinline__ float capped(float x, float cap, float two_over_cap_log2) {
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(exp2_approx(x * two_over_cap_log2) + 1.f));
  return cap - 2.f * cap * y;
}

// The larger of three of which one is positive: floats are then ordered like their bits.
__device__ __forceinline__ float max_of_three(float a, float b, float c) {
#if __CUDA_ARCH__ >= 900
  return __int_as_float(__vimax3_s32(__float_as_int(a), __float_as_int(b), __float_as_int(c)));
#else
  return fmaxf(fmaxf(a, b), c);
#endif
}

// Replaces scores that rows `first_row` and `first_row` + 8 of a work may not see. `column`: key of scores[0].
template <int kCount>
__device__ __forceinline__ void mask_scores(float (&scores)[kCount], const Params& p, const Schedule& s, const Work& w,
                                            int first_row, int column) {
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const int token = min_of((first_row + 8 * h) * s.pack_inverse >> 16, w.num_tokens - 1);
    const sm90::KeyRange keys = sm90::keys_of_token(p, w, w.first_token + token);
    const int begin = keys.begin - column, end = keys.end - column;
#pragma unroll
    for (int i = 0; i < kCount / 2; ++i) {
      if (i / 2 * 8 + i % 2 >= end) scores[i / 2 * 4 + h * 2 + i % 2] = -INFINITY;
    }
    if (begin > 0) {  // a window begins here
#pragma unroll
      for (int i = 0; i < kCount / 2; ++i) {
        if (i / 2 * 8 + i % 2 < begin) scores[i / 2 * 4 + h * 2 + i % 2] = -INFINITY;
      }
    }
    if (p.hidden_keys != nullptr) {
      const sm90::KeyRange hidden = sm90::hidden_from(p, w, w.first_token + token);
#pragma unroll
      for (int i = 0; i < kCount / 2; ++i) {
        const int key = column + i / 2 * 8 + i % 2;
        if (key >= hidden.begin && key < hidden.end) scores[i / 2 * 4 + h * 2 + i % 2] = -INFINITY;
      }
    }
    if (p.tree_mask == nullptr || column + 4 * kCount <= w.draft) continue;
    uint32_t visible = 0;
#pragma unroll
    for (int i = 0; i < kCount / 2; ++i) {
      const int key = i / 2 * 8 + i % 2;
      if (key % 32 == 0) visible = sm90::tree_bits(p, w, w.first_token + token, column + key - w.draft);
      float& score = scores[i / 2 * 4 + h * 2 + i % 2];
      if (!(visible >> (key % 32) & 1)) score = -INFINITY;
    }
  }
}

// How far the softmax of a lane's two rows has come. The reference of a row moves only when a score exceeds it by kTop
// powers of two (FlashAttention-4): accumulators are rarely rescaled, and stay far from overflow.
struct RowSums {
  static constexpr float kTop = 8.f;
  float reference[2] = {};  // a probability is 2^(score * scale - reference); 0 before a row has seen a key
  float sum[2] = {};        // of this lane's columns

  // Scores become powers of two. Returns the largest, or 0.
  template <int kCount>
  __device__ __forceinline__ float shift(float (&scores)[kCount], float scale) const {
    float top[2] = {0.f, 0.f};
#pragma unroll
    for (int i = 0; i < kCount; ++i) scores[i] = fmaf(scores[i], scale, -reference[i / 2 % 2]);
#pragma unroll
    for (int i = 0; i < kCount; i += 2) top[i / 2 % 2] = max_of_three(top[i / 2 % 2], scores[i], scores[i + 1]);
    return fmaxf(top[0], top[1]);
  }

  // Moves the references of rows that have none yet (bit h of `fresh`), or that a shifted score exceeds by far. Sums
  // and results shrink. Returns which rows have none still.
  template <int kCount, int kResults>
  __device__ __forceinline__ unsigned move(float (&scores)[kCount], float (&out)[kResults], unsigned fresh) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const float largest = row_max(scores, h);
      const bool is_fresh = fresh >> h & 1;
      if (!(largest > (is_fresh ? -INFINITY : kTop))) continue;
      const float shrink = is_fresh ? 0.f : exp2_approx(-largest);
      fresh &= ~(1u << h);
      reference[h] += largest;
      sum[h] *= shrink;
#pragma unroll
      for (int i = 0; i < kCount / 2; ++i) scores[i / 2 * 4 + h * 2 + i % 2] -= largest;
#pragma unroll
      for (int i = 0; i < kResults / 2; ++i) out[i / 2 * 4 + h * 2 + i % 2] *= shrink;
    }
    return fresh;
  }

  // The sum over all columns of a row.
  __device__ __forceinline__ float total(int h) const {
    const float pair = sum[h] + __shfl_xor_sync(~0u, sum[h], 1);
    return pair + __shfl_xor_sync(~0u, pair, 2);
  }

 private:
  template <int kCount>
  __device__ __forceinline__ static float row_max(const float (&scores)[kCount], int h) {
    float largest = scores[h * 2];
#pragma unroll
    for (int i = 1; i < kCount / 2; ++i) largest = fmaxf(largest, scores[i / 2 * 4 + h * 2 + i % 2]);
    largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, 1));
    return fmaxf(largest, __shfl_xor_sync(~0u, largest, 2));
  }
};

}  // namespace attnops::fmha
