#pragma once
#include "device/sm80/mma.cuh"
#include "device/sm90/wgmma.cuh"
#include "fmha/sm90/work.cuh"

namespace attnops::fmha::sm90 {

inline constexpr float kLog2E = 1.4426950408889634f;

// tanh(x) for any x, exact to some 1e-7 of 1, where the unit's own is not.
__device__ __forceinline__ float tanh_exact(float x) {
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(exp2_approx(x * (2.f * kLog2E)) + 1.f));
  return 1.f - 2.f * y;
}

// Scores become tanh(score * scale). Those far below the cap by a polynomial whose coefficients hold the scale, exact
// to 1.2e-6 for |score * scale| <= 0.3. As a rule these are all of a warp. What a score becomes depends on that score
// alone: the others of the warp are other rows, whichever the batch and its tiles put there.
template <int kCount>
__device__ __forceinline__ void cap_scores(float (&scores)[kCount], float scale) {
  const bool has_powers = fabsf(scale) > 1e-7f && fabsf(scale) < 1e7f;  // up to the fifth
  const float bound = has_powers ? 0.3f / fabsf(scale) : -1.f;
  const float square = scale * scale, a = 0.99999887f * scale, b = -0.33310169f * (scale * square),
              c = 0.12635571f * (scale * square * square);
  float largest[4] = {};  // chains that do not wait for each other
#pragma unroll
  for (int i = 0; i < kCount; ++i) largest[i % 4] = fmaxf(largest[i % 4], fabsf(scores[i]));
  const float all = fmaxf(fmaxf(largest[0], largest[1]), fmaxf(largest[2], largest[3]));
  if (__any_sync(0xffffffffu, !(all <= bound))) {
#pragma unroll
    for (float& score : scores) {
      const float z = score * score, near = score * fmaf(fmaf(c, z, b), z, a), exact = tanh_exact(score * scale);
      score = fabsf(score) <= bound ? near : exact;
    }
  } else {
#pragma unroll
    for (float& score : scores) {
      const float z = score * score;
      score *= fmaf(fmaf(c, z, b), z, a);
    }
  }
}

// Exponents up to here need no reference: their powers fit bfloat16, and sums of these over all keys fit float32.
inline constexpr float kMostExponent = 80.f;

// Capped scores, as exponents: outer * tanh(score * inner), for outer <= kMostExponent. By a polynomial of degree three
// to 0.14, of degree five to 0.35: both err by 4.5e-7 of outer. What a score becomes depends on that score alone.
struct Capped {
  float near, mid, a, b;  // near, mid: squares of scores that have polynomials, or negative

  __device__ __forceinline__ void start(float inner, float outer) {
    const bool has_powers = fabsf(inner) > 1e-6f && fabsf(inner) < 1e6f;  // up to the fifth
    near = has_powers ? 0.0196f / (inner * inner) : -1.f;
    mid = has_powers ? 0.1225f / (inner * inner) : -1.f;
    a = 0.99998419f * (inner * outer);
    b = -0.33009495f * (inner * outer * inner * inner);
  }

  template <int kCount>
  __device__ __forceinline__ void to_exponents(float (&scores)[kCount], float inner, float outer) const {
    constexpr int kBlock = 16;  // squares of all scores would take too many registers
#pragma unroll
    for (int begin = 0; begin < kCount; begin += kBlock) {
      float z[kBlock];
      int top[2] = {0, 0};  // positive floats are ordered like their bits
#pragma unroll
      for (int i = 0; i < kBlock; ++i) z[i] = scores[begin + i] * scores[begin + i];
#pragma unroll
      for (int i = 0; i < kBlock; i += 2) {
        top[i / 2 % 2] = __vimax3_s32(top[i / 2 % 2], __float_as_int(z[i]), __float_as_int(z[i + 1]));
      }
      const int largest = max_of(top[0], top[1]);
      if (!__any_sync(0xffffffffu, largest > __float_as_int(near))) {
#pragma unroll
        for (int i = 0; i < kBlock; ++i) scores[begin + i] *= fmaf(b, z[i], a);
      } else if (!__any_sync(0xffffffffu, largest > __float_as_int(mid))) {
#pragma unroll
        for (int i = 0; i < kBlock; ++i) scores[begin + i] *= factor(z[i], inner, outer);
      } else {
#pragma unroll
        for (int i = 0; i < kBlock; ++i) {
          float inverse;  // of 1 + e^2x
          asm("rcp.approx.ftz.f32 %0, %1;"
              : "=f"(inverse)
              : "f"(exp2_approx(scores[begin + i] * (2.f * kLog2E * inner)) + 1.f));
          const float exact = fmaf(-2.f * outer, inverse, outer),
                      close = scores[begin + i] * factor(z[i], inner, outer);
          scores[begin + i] = z[i] <= mid ? close : exact;
        }
      }
    }
  }

 private:
  __device__ __forceinline__ float factor(float z, float inner, float outer) const {
    const float square = inner * inner, first = inner * outer;
    const float five =
        fmaf(fmaf(0.12211402f * (first * square * square), z, -0.33261985f * (first * square)), z, 0.99998765f * first);
    return z <= near ? fmaf(b, z, a) : five;
  }
};

// What two rows of a lane may see, and how far their softmax has come. The reference of a row moves only when a score
// exceeds it by kTop powers of two (FlashAttention-4): accumulators are rarely rescaled, and stay far from overflow.
//
// e4m3 probabilities are to use their range: where the reference is the largest score, that one is 2^kLift.
template <bool kFp8>
struct RowPair {
  static constexpr float kTop = 8.f, kLift = kFp8 ? 5.f : 0.f;
  int begin[2], end[2], token[2];
  float reference[2];  // a probability is 2^(score * scale - reference)
  float sum[2];        // of this lane's columns
  bool settled;        // no reference of the warp's rows is -inf

  // kPlain: without a tree mask.
  template <bool kPlain = false>
  __device__ __forceinline__ void start(const Params& p, const Schedule& s, const Work& w, int first_row) {
    settled = false;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int row = first_row + 8 * h;
      token[h] = min_of(row * s.pack_inverse >> 16, w.num_tokens - 1);
      KeyRange keys;
      if constexpr (kPlain) {
        keys = keys_at(p, w.draft + w.first_token + token[h], w.seqlen_k);
      } else {
        keys = keys_of_token(p, w, w.first_token + token[h]);
      }
      begin[h] = keys.begin;
      end[h] = keys.end;
      reference[h] = -INFINITY;
      sum[h] = 0.f;
    }
  }

  // Replaces scores of keys outside the range of a row. `column`: key of scores[0].
  template <int kCount>
  __device__ __forceinline__ void mask_ranges(float (&scores)[kCount], int column) const {
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
  }

  // Replaces scores of keys that a row may not see.
  template <int kCount>
  __device__ __forceinline__ void mask(float (&scores)[kCount], const Params& p, const Work& w, int column) const {
    mask_ranges(scores, column);
    if (p.hidden_keys != nullptr) hide(scores, p, w, column);
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

  // Scores become exponents, at most kTop. Returns whether references have moved, and by which factors values shrink.
  // `kAlways`: as if no row had a reference, which suits tiles of few products.
  // `scale`: one of all rows, or one of each.
  template <bool kAlways, class Scale, int kCount>
  __device__ __forceinline__ bool to_exponents(float (&scores)[kCount], const Scale& scale, float (&shrink)[2]) {
    if (kAlways || !settled) {
      const float lowest[2] = {reference[0], reference[1]};
      bool moved = false;
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const float largest = row_max(scores, h) * of_row(scale, h);
        shrink[h] = 1.f;
        if (largest - lowest[h] > kTop) {  // false for -inf less -inf
          move_to(h, largest - kLift, lowest[h], shrink[h]);
          moved = true;
        }
        add_to_row(scores, h, of_row(scale, h), reference[h] == -INFINITY ? 0.f : -reference[h]);
      }
      settled = __all_sync(0xffffffffu, reference[0] > -INFINITY && reference[1] > -INFINITY);
      return __any_sync(0xffffffffu, moved);
    }
    add_to_row(scores, 0, of_row(scale, 0), -reference[0]);
    add_to_row(scores, 1, of_row(scale, 1), -reference[1]);
    // Positive floats are ordered like their bits, and a negative one's are below them. Three are compared at once.
    int top[2] = {0, 0};
#pragma unroll
    for (int i = 0; i < kCount; i += 4) {
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        top[j] = __vimax3_s32(top[j], __float_as_int(scores[i + 2 * j]), __float_as_int(scores[i + 2 * j + 1]));
      }
    }
    if (!__any_sync(0xffffffffu, max_of(top[0], top[1]) > __float_as_int(kTop))) return false;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const float largest = row_max(scores, h);
      shrink[h] = 1.f;
      if (largest > kTop) {
        move_to(h, reference[h] + (largest - kLift), reference[h], shrink[h]);
        add_to_row(scores, h, 1.f, kLift - largest);
      }
    }
    return true;
  }

  // Exponents become probabilities, and are added to the sums.
  template <int kCount>
  __device__ __forceinline__ void exponentiate(float (&scores)[kCount]) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      scores[i] = exp2_approx(scores[i]);
      sum[i / 2 % 2] += scores[i];
    }
  }

  // The sum over all columns of a row.
  __device__ __forceinline__ float total(int h) const {
    float all = sum[h] + __shfl_xor_sync(0xffffffffu, sum[h], 1);
    return all + __shfl_xor_sync(0xffffffffu, all, 2);
  }

 private:
  static __device__ __forceinline__ float of_row(float scale, int) { return scale; }
  static __device__ __forceinline__ float of_row(const float (&scale)[2], int h) { return scale[h]; }

  // As a rule one of a work's tiles has hidden keys, its last.
  template <int kCount>
  __device__ __forceinline__ void hide(float (&scores)[kCount], const Params& p, const Work& w, int column) const {
    const KeyRange hidden[2] = {hidden_from(p, w, w.first_token + token[0]),
                                hidden_from(p, w, w.first_token + token[1])};
    if (!__any_sync(0xffffffffu, column + 2 * kCount > min_of(hidden[0].begin, hidden[1].begin))) return;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const unsigned size = max_of(hidden[h].end - hidden[h].begin, 0);
      const int from = column - hidden[h].begin;
#pragma unroll
      for (int i = 0; i < kCount / 2; ++i) {
        if (static_cast<unsigned>(from + i / 2 * 8 + i % 2) < size) scores[i / 2 * 4 + h * 2 + i % 2] = -INFINITY;
      }
    }
  }

  template <int kCount>
  static __device__ __forceinline__ float row_max(const float (&scores)[kCount], int h) {
    float largest = scores[h * 2];
#pragma unroll
    for (int i = 1; i < kCount / 2; ++i) largest = fmaxf(largest, scores[i / 2 * 4 + h * 2 + i % 2]);
    largest = fmaxf(largest, __shfl_xor_sync(0xffffffffu, largest, 1));
    return fmaxf(largest, __shfl_xor_sync(0xffffffffu, largest, 2));
  }

  template <int kCount>
  static __device__ __forceinline__ void add_to_row(float (&scores)[kCount], int h, float scale, float offset) {
#pragma unroll
    for (int i = 0; i < kCount / 2; ++i) {
      float& score = scores[i / 2 * 4 + h * 2 + i % 2];
      score = fmaf(score, scale, offset);
    }
  }

  __device__ __forceinline__ void move_to(int h, float next, float before, float& shrink) {
    shrink = exp2_approx(before - next);
    reference[h] = next;
    sum[h] *= shrink;
  }
};

}  // namespace attnops::fmha::sm90
