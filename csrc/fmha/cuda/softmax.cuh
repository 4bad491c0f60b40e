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
    const unsigned size = keys.end - keys.begin;
    const int from = column - keys.begin;
#pragma unroll
    for (int i = 0; i < kCount / 2; ++i) {
      float& score = scores[i / 2 * 4 + h * 2 + i % 2];
      if (static_cast<unsigned>(from + i / 2 * 8 + i % 2) >= size) score = -INFINITY;
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
  float reference[2] = {-INFINITY, -INFINITY};  // a probability is 2^(score * scale - reference)
  float sum[2] = {};                            // of this lane's columns
  bool settled = false;                         // every row of the warp's block has a reference

  // Scores become probabilities. Returns whether references have moved, and by which factors values shrink.
  template <int kCount>
  __device__ __forceinline__ bool probabilities(float (&scores)[kCount], float scale, float (&shrink)[2]) {
    bool moved = false;
    shrink[0] = shrink[1] = 1.f;
    if (!settled) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const float largest = row_max(scores, h) * scale;
        if (largest - reference[h] > kTop) {  // false for -inf less -inf
          shrink[h] = exp2_approx(reference[h] - largest);
          reference[h] = largest;
        }
        add(scores, h, scale, reference[h] == -INFINITY ? 0.f : -reference[h]);
      }
      settled = __all_sync(~0u, reference[0] > -INFINITY && reference[1] > -INFINITY);
      moved = true;
    } else {
      float top = 0.f;
      add(scores, 0, scale, -reference[0]);
      add(scores, 1, scale, -reference[1]);
#pragma unroll
      for (int i = 0; i < kCount; i += 2) top = max_of_three(top, scores[i], scores[i + 1]);
      if (__any_sync(~0u, top > kTop)) {
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          const float largest = row_max(scores, h);
          if (largest > kTop) {
            shrink[h] = exp2_approx(-largest);
            reference[h] += largest;
            add(scores, h, 1.f, -largest);
          }
        }
        moved = true;
      }
    }
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      float total = sum[h] * shrink[h];
#pragma unroll
      for (int i = 0; i < kCount / 2; ++i) {
        float& score = scores[i / 2 * 4 + h * 2 + i % 2];
        score = exp2_approx(score);
        total += score;
      }
      sum[h] = total;
    }
    return moved;
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

  template <int kCount>
  __device__ __forceinline__ static void add(float (&scores)[kCount], int h, float scale, float offset) {
#pragma unroll
    for (int i = 0; i < kCount / 2; ++i) {
      float& score = scores[i / 2 * 4 + h * 2 + i % 2];
      score = fmaf(score, scale, offset);
    }
  }
};

}  // namespace attnops::fmha
