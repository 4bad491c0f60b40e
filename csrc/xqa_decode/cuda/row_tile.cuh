#pragma once
#include <cmath>

#include "device/common/tree_rows.cuh"
#include "device/sm80/fp8_rows.cuh"
#include "xqa_decode/cuda/pieces.cuh"

namespace attnops::xqa_decode {

// The state of a warp's query rows over one piece, and what a chunk of keys does to it. Both products are transposed,
// keys (or output dims) in the M of the matrix instruction and query rows in its N = 8: a small group wastes little.
// In a lane with g = lane / 4, t = lane % 4:
//   scores of key tile m: keys 16 m + g, + 8; rows 8 n + 2t, + 1;
//   output of dim tile j: dims 16 j + g, + 8 (FP8: 16 j + 2g, + 1); the same rows.
template <class Tr>
struct RowTile {
  using T = typename Tr::T;
  static constexpr bool kKeepQueries = Tr::kSteps * Tr::kRowTiles <= 16;  // in registers; else read per chunk

  float out[Tr::kDimTiles][Tr::kRowTiles][4];
  float row_max[Tr::kRowTiles][2];  // of the scores in units of log2, the same in all lanes of a t
  float row_sum[Tr::kRowTiles][2];  // of this lane's keys
  float score_scale[Tr::kRowTiles][2];
  uint32_t q[kKeepQueries ? Tr::kSteps : 2][Tr::kRowTiles][2];
  uint32_t q_address;  // of this lane's row in the queries' first row tile

  // `queries` and `row_scale` lie in shared memory and begin with this warp's first row.
  __device__ void begin(uint32_t queries, const float* row_scale, float scale, int lane) {
#pragma unroll
    for (int j = 0; j < Tr::kDimTiles; ++j) {
#pragma unroll
      for (int n = 0; n < Tr::kRowTiles; ++n) {
#pragma unroll
        for (int i = 0; i < 4; ++i) out[j][n][i] = 0.f;
      }
    }
#pragma unroll
    for (int n = 0; n < Tr::kRowTiles; ++n) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        row_max[n][i] = -INFINITY;
        row_sum[n][i] = 0.f;
        score_scale[n][i] = Tr::kFp8 ? scale * row_scale[8 * n + lane % 4 * 2 + i] : scale;
      }
    }
    const int row = lane & 7;
    q_address = queries + row * (Tr::kHeadDim * 2) + (((lane >> 3) ^ row) << 4);
    if constexpr (kKeepQueries) {
#pragma unroll
      for (int s = 0; s < Tr::kSteps; s += 2) load_queries(s, q[s], q[s + 1]);
    }
  }

  // Query fragments of two neighbouring steps.
  __device__ void load_queries(int step, uint32_t (&a)[Tr::kRowTiles][2], uint32_t (&b)[Tr::kRowTiles][2]) const {
#pragma unroll
    for (int n = 0; n < Tr::kRowTiles; ++n) {
      uint32_t r[4];
      ldmatrix_x4(r, (q_address ^ (step * 32)) + n * 8 * Tr::kHeadDim * 2);
      a[n][0] = r[0], a[n][1] = r[1], b[n][0] = r[2], b[n][1] = r[3];
    }
  }

  // scores[m][n] = keys x queries, unscaled.
  __device__ void multiply_keys(uint32_t stage, int lane, float (&scores)[Tr::kKeyTiles][Tr::kRowTiles][4]) {
    // One accumulator would make every instruction wait for the one before: two, when there is only one tile.
    constexpr bool kTwo = Tr::kKeyTiles * Tr::kRowTiles == 1;
    float odd[Tr::kRowTiles][4] = {};
    const int key = lane & 15;
    const uint32_t address = stage + key * Tr::kKeyBytes + (((lane >> 4) ^ Tr::swizzle(key)) << 4);
#pragma unroll
    for (int s = 0; s < Tr::kSteps; s += 2) {
      if constexpr (!kKeepQueries) load_queries(s, q[0], q[1]);
      const auto& q0 = q[kKeepQueries ? s : 0];
      const auto& q1 = q[kKeepQueries ? s + 1 : 1];
#pragma unroll
      for (int m = 0; m < Tr::kKeyTiles; ++m) {
        uint32_t a0[4], a1[4];
        if constexpr (Tr::kFp8) {
          uint32_t w[4];
          ldmatrix_x4(w, (address ^ (s * 16)) + m * 16 * Tr::kKeyBytes);
          fp8x4_to_half<typename Tr::Fp8>(w[0], a0[0], a0[2]);
          fp8x4_to_half<typename Tr::Fp8>(w[1], a0[1], a0[3]);
          fp8x4_to_half<typename Tr::Fp8>(w[2], a1[0], a1[2]);
          fp8x4_to_half<typename Tr::Fp8>(w[3], a1[1], a1[3]);
        } else {
          ldmatrix_x4(a0, (address ^ (s * 32)) + m * 16 * Tr::kKeyBytes);
          ldmatrix_x4(a1, (address ^ (s * 32 + 32)) + m * 16 * Tr::kKeyBytes);
        }
#pragma unroll
        for (int n = 0; n < Tr::kRowTiles; ++n) {
          mma_m16n8k16<T>(scores[m][n], a0, q0[n][0], q0[n][1]);
          mma_m16n8k16<T>(kTwo ? odd[n] : scores[m][n], a1, q1[n][0], q1[n][1]);
        }
      }
    }
    if constexpr (kTwo) {
#pragma unroll
      for (int i = 0; i < 4; ++i) scores[0][0][i] += odd[0][i];
    }
  }

  // To units of log2, soft cap applied.
  __device__ void scale_scores(float logit_cap, float (&scores)[Tr::kKeyTiles][Tr::kRowTiles][4]) const {
#pragma unroll
    for (int m = 0; m < Tr::kKeyTiles; ++m) {
#pragma unroll
      for (int n = 0; n < Tr::kRowTiles; ++n) {
#pragma unroll
        for (int i = 0; i < 4; ++i) scores[m][n][i] *= score_scale[n][i & 1];
      }
    }
    if (logit_cap == 0.f) return;
    const float to_cap = 2.f / logit_cap;  // tanh(x) = 1 - 2 / (1 + e^2x), and the scores are in log2 already
    const float from_cap = logit_cap * kLog2e;
#pragma unroll
    for (int m = 0; m < Tr::kKeyTiles; ++m) {
#pragma unroll
      for (int n = 0; n < Tr::kRowTiles; ++n) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          scores[m][n][i] = from_cap * (1.f - __fdividef(2.f, 1.f + exp2_approx(scores[m][n][i] * to_cap)));
        }
      }
    }
  }

  // Hides the keys that a row may not see; the rules are those of the reference. `first_row` is this warp's; bit k of
  // `good`: the chunk's key k has a page.
  template <class Piece>
  __device__ static void mask_scores(const Params& p, const Shape& shape, const Piece& piece, int first_row,
                                     int first_key, unsigned good, int lane,
                                     float (&scores)[Tr::kKeyTiles][Tr::kRowTiles][4]) {
    const int new_tokens_begin = piece.length() - p.seqlen_q;
#pragma unroll
    for (int n = 0; n < Tr::kRowTiles; ++n) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int row = first_row + 8 * n + lane % 4 * 2 + i;
        const int token = min_of(shape.by_group.divide(row), p.seqlen_q - 1);
        const int position = new_tokens_begin + token;
        const int begin = p.window_left < 0 ? 0
                          : p.tree_mask ? draft_window_begin(p, piece.request(), token, piece.length() - p.tree_keys)
                                        : position - p.window_left;
        const int end = p.causal && !p.tree_mask ? min_of(position + 1, piece.keys().end) : piece.keys().end;
        const uint8_t* tree =
            p.tree_mask ? p.tree_mask + piece.request() * p.tree_mask_stride_request + token * p.tree_mask_stride_token
                        : nullptr;
#pragma unroll
        for (int m = 0; m < Tr::kKeyTiles; ++m) {
#pragma unroll
          for (int h = 0; h < 2; ++h) {
            const int in_chunk = 16 * m + 8 * h + lane / 4;
            const int key = first_key + in_chunk;
            bool seen = key >= max_of(begin, piece.keys().begin) && key < end && (good >> in_chunk & 1);
            const int draft = key - (piece.length() - p.tree_keys);
            if (tree && seen && draft >= 0) seen = tree[draft / 8] >> (draft % 8) & 1;
            if (!seen) scores[m][n][2 * h + i] = -INFINITY;
          }
        }
      }
    }
  }

  // Turns scores into probabilities, packed as the second product's B fragments, and brings the state up to date.
  __device__ void soften(float (&scores)[Tr::kKeyTiles][Tr::kRowTiles][4],
                         uint32_t (&probs)[Tr::kKeyTiles][Tr::kRowTiles][2]) {
    float next_max[Tr::kRowTiles][2];
    bool grows = false;
#pragma unroll
    for (int n = 0; n < Tr::kRowTiles; ++n) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        float top = fmaxf(scores[0][n][i], scores[0][n][i + 2]);
#pragma unroll
        for (int m = 1; m < Tr::kKeyTiles; ++m) top = fmaxf(top, fmaxf(scores[m][n][i], scores[m][n][i + 2]));
        top = fmaxf(top, __shfl_xor_sync(~0u, top, 4));
        top = fmaxf(top, __shfl_xor_sync(~0u, top, 8));
        top = fmaxf(top, __shfl_xor_sync(~0u, top, 16));
        next_max[n][i] = fmaxf(row_max[n][i], top);
        grows |= top > row_max[n][i];
      }
    }
    if (__any_sync(~0u, grows)) {
#pragma unroll
      for (int n = 0; n < Tr::kRowTiles; ++n) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          const float factor = row_max[n][i] == -INFINITY ? 0.f : exp2_approx(row_max[n][i] - next_max[n][i]);
          row_max[n][i] = next_max[n][i];
          row_sum[n][i] *= factor;
#pragma unroll
          for (int j = 0; j < Tr::kDimTiles; ++j) {
            out[j][n][i] *= factor;
            out[j][n][i + 2] *= factor;
          }
        }
      }
    }
#pragma unroll
    for (int n = 0; n < Tr::kRowTiles; ++n) {
      float base[2];
#pragma unroll
      for (int i = 0; i < 2; ++i) base[i] = (row_max[n][i] == -INFINITY ? 0.f : row_max[n][i]) - Tr::kProbShift;
#pragma unroll
      for (int m = 0; m < Tr::kKeyTiles; ++m) {
        float(&s)[4] = scores[m][n];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          s[i] = exp2_approx(s[i] - base[i & 1]);
          row_sum[n][i & 1] += s[i];
        }
        probs[m][n][0] = transpose_8x8(pack2<T>(s[0], s[1]));
        probs[m][n][1] = transpose_8x8(pack2<T>(s[2], s[3]));
      }
    }
  }

  // out += values^T x probabilities.
  __device__ void multiply_values(uint32_t values, int lane, const uint32_t (&probs)[Tr::kKeyTiles][Tr::kRowTiles][2]) {
    if constexpr (Tr::kFp8) {
      // A transposed load moves pairs of bytes: a lane gets dims 2g and 2g + 1 of keys 2t and 2t + 1.
      const int key = lane & 15;
      const uint32_t address = values + key * Tr::kKeyBytes + (((lane >> 4) ^ Tr::swizzle(key)) << 4);
#pragma unroll
      for (int j = 0; j < Tr::kDimTiles; j += 2) {
#pragma unroll
        for (int m = 0; m < Tr::kKeyTiles; ++m) {
          uint32_t w[4];
          ldmatrix_x4_trans(w, (address ^ (j * 16)) + m * 16 * Tr::kKeyBytes);
          uint32_t a0[4], a1[4];
          fp8x4_to_half<typename Tr::Fp8>(__byte_perm(w[0], 0, 0x3120), a0[0], a0[1]);
          fp8x4_to_half<typename Tr::Fp8>(__byte_perm(w[1], 0, 0x3120), a0[2], a0[3]);
          fp8x4_to_half<typename Tr::Fp8>(__byte_perm(w[2], 0, 0x3120), a1[0], a1[1]);
          fp8x4_to_half<typename Tr::Fp8>(__byte_perm(w[3], 0, 0x3120), a1[2], a1[3]);
#pragma unroll
          for (int n = 0; n < Tr::kRowTiles; ++n) {
            mma_m16n8k16<T>(out[j][n], a0, probs[m][n][0], probs[m][n][1]);
            mma_m16n8k16<T>(out[j + 1][n], a1, probs[m][n][0], probs[m][n][1]);
          }
        }
      }
    } else {
      const int key = (lane & 7) + (lane >> 4) * 8;
      const uint32_t address = values + key * Tr::kKeyBytes + (((lane >> 3 & 1) ^ Tr::swizzle(key)) << 4);
#pragma unroll
      for (int j = 0; j < Tr::kDimTiles; ++j) {
#pragma unroll
        for (int m = 0; m < Tr::kKeyTiles; ++m) {
          uint32_t a[4];
          ldmatrix_x4_trans(a, (address ^ (j * 32)) + m * 16 * Tr::kKeyBytes);
#pragma unroll
          for (int n = 0; n < Tr::kRowTiles; ++n) mma_m16n8k16<T>(out[j][n], a, probs[m][n][0], probs[m][n][1]);
        }
      }
    }
  }

  // Where (row, dim) lies in a warp's float output in shared memory: rotated so that neither side meets bank conflicts.
  __device__ static constexpr int scratch_at(int row, int dim) {
    return row * Tr::kHeadDim + (dim ^ ((row >> 1 & 3) << 3));
  }

  // Leaves the state in shared memory: `scratch` float [kRows][kHeadDim], `stats` float2 [kRows]: maximum and sum.
  __device__ void leave(float* scratch, float2* stats, int lane) {
    const int g = lane / 4, t = lane % 4;
#pragma unroll
    for (int n = 0; n < Tr::kRowTiles; ++n) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int row = 8 * n + 2 * t + i;
        float sum = row_sum[n][i];
        sum += __shfl_xor_sync(~0u, sum, 4);
        sum += __shfl_xor_sync(~0u, sum, 8);
        sum += __shfl_xor_sync(~0u, sum, 16);
        if (g == 0) stats[row] = make_float2(row_max[n][i], sum);
#pragma unroll
        for (int j = 0; j < Tr::kDimTiles; ++j) {
          if constexpr (Tr::kFp8) {
            *reinterpret_cast<float2*>(scratch + scratch_at(row, 16 * j + 2 * g)) =
                make_float2(out[j][n][i], out[j][n][i + 2]);
          } else {
            scratch[scratch_at(row, 16 * j + g)] = out[j][n][i];
            scratch[scratch_at(row, 16 * j + g + 8)] = out[j][n][i + 2];
          }
        }
      }
    }
  }
};

}  // namespace attnops::xqa_decode
