#pragma once
#include <cmath>

#include "device/sm80/mma.cuh"
#include "device/sm90/barrier.cuh"
#include "xqa_decode/cuda/pieces.cuh"
#include "xqa_decode/sm90/traits.cuh"

namespace attnops::xqa_decode::sm90 {

// The state of a pass's query rows over one piece, and what a tile of keys does to it. Both products are transposed:
// keys, then output dims, are the M = 64 of the matrix instruction, query rows its N, so that few rows waste little.
// In a lane with g = lane / 4, t = lane % 4 of warp w:
//   scores[4 n + 2 h + i]: key 16 w + g + 8 h of the tile, row 8 n + 2 t + i;
//   out[b][4 n + 2 h + i]: dim 64 b + 16 w + g + 8 h, the same row.
// All warps hold the same reference maxima; sums are those of a lane's own keys.
template <class Tr>
struct RowBlock {
  using T = typename Tr::T;
  using Shared = SharedLayout<Tr>;
  static constexpr int kScores = Tr::kRows / 2;

  float out[Tr::kBlocks][kScores];
  float reference[Tr::kRowTiles][2];  // in units of log2; kNothingSeen before the first visible key
  float sum[Tr::kRowTiles][2];
  float score_scale;  // of raw scores, to units of log2
  float scale;        // what is left of it when scores become probabilities

  static constexpr float kNothingSeen = -1e30f;  // finite, so that it can be subtracted from a hidden key's -inf

  __device__ __forceinline__ void begin(float to_log2, float logit_cap) {
    score_scale = to_log2;
    scale = logit_cap == 0.f && to_log2 > 0.f ? to_log2 : 1.f;
    clear();
  }

  __device__ __forceinline__ void clear() {
#pragma unroll
    for (int b = 0; b < Tr::kBlocks; ++b) {
#pragma unroll
      for (int i = 0; i < kScores; ++i) out[b][i] = 0.f;
    }
#pragma unroll
    for (int n = 0; n < Tr::kRowTiles; ++n) {
#pragma unroll
      for (int i = 0; i < 2; ++i) reference[n][i] = kNothingSeen, sum[n][i] = 0.f;
    }
  }

  // A descriptor whose address is `steps` 16-byte units further on. All warps hold the same: the halves are told apart
  // so that the compiler counts in uniform registers, and only in the lower half.
  struct Descriptor {
    uint32_t low, high;

    __device__ __forceinline__ explicit Descriptor(uint64_t whole)
        : low(__shfl_sync(~0u, static_cast<uint32_t>(whole), 0)), high(static_cast<uint32_t>(whole >> 32)) {}
    __device__ __forceinline__ uint64_t at(int steps) const {
      uint64_t whole;
      asm("mov.b64 %0, {%1, %2};" : "=l"(whole) : "r"(low + steps), "r"(high));
      return whole;
    }
  };

  // scores = keys x queries^T, in flight.
  __device__ __forceinline__ static void multiply_keys(uint32_t keys, uint32_t queries, float (&scores)[kScores]) {
    const Descriptor key(hopper::operand_descriptor(keys)), query(hopper::operand_descriptor(queries));
    hopper::wgmma_fence();
#pragma unroll
    for (int b = 0; b < Tr::kBlocks; ++b) {
#pragma unroll
      for (int k = 0; k < 4; ++k) {
        hopper::wgmma_rows<T, 0, 0>(scores, key.at(b * (hopper::kTileBytes >> 4) + k * hopper::kStepKMajor),
                                    query.at(b * (Tr::kRows * 128 >> 4) + k * hopper::kStepKMajor), b + k > 0);
      }
    }
    hopper::wgmma_commit();
  }

  // out += values^T x probabilities, in flight.
  __device__ __forceinline__ void multiply_values(uint32_t values, uint32_t probs) {
    const Descriptor value(hopper::operand_descriptor(values));
    const Descriptor prob(hopper::plain_descriptor(probs, Tr::kTileTokens * 16));
    hopper::wgmma_fence();
#pragma unroll
    for (int b = 0; b < Tr::kBlocks; ++b) {
#pragma unroll
      for (int k = 0; k < 4; ++k) {
        hopper::wgmma_rows<T, 1, 1>(out[b], value.at(b * (hopper::kTileBytes >> 4) + k * hopper::kStepMnMajor),
                                    prob.at(k * hopper::kStepPlain), 1);
      }
    }
    hopper::wgmma_commit();
  }

  // Until at most kPending newer products are in flight.
  template <int kPending>
  __device__ __forceinline__ void wait_for_values() {
    hopper::wgmma_wait<kPending>();
#pragma unroll
    for (int b = 0; b < Tr::kBlocks; ++b) hopper::pin(out[b]);
  }

  // Soft cap. A positive scale alone waits for the exponent's subtraction: both are one instruction there.
  __device__ __forceinline__ void scale_scores(float logit_cap, float (&scores)[kScores]) const {
    if (logit_cap == 0.f && scale == score_scale) return;
#pragma unroll
    for (int i = 0; i < kScores; ++i) scores[i] *= score_scale;
    if (logit_cap == 0.f) return;
    const float to_cap = 2.f / logit_cap;  // tanh(x) = 1 - 2 / (1 + e^2x), and the scores are in log2 already
    const float from_cap = logit_cap * kLog2e;
#pragma unroll
    for (int i = 0; i < kScores; ++i) {
      scores[i] = from_cap * (1.f - __fdividef(2.f, 1.f + exp2_approx(scores[i] * to_cap)));
    }
  }

  // Hides the keys that a row may not see; the rules are those of the reference.
  template <class Piece>
  __device__ __forceinline__ static void mask_scores(const Params& p, const Shape& shape, const Piece& piece,
                                                     int first_row, int first_key, float (&scores)[kScores]) {
    const int warp = threadIdx.x / 32 % Tr::kWarps, g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
    const int new_tokens_begin = piece.length() - p.seqlen_q;
#pragma unroll
    for (int n = 0; n < Tr::kRowTiles; ++n) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int token = min_of(shape.by_group.divide(first_row + 8 * n + 2 * t + i), p.seqlen_q - 1);
        const int position = new_tokens_begin + token;
        const int begin = p.window_left < 0 ? 0 : position - p.window_left;
        const int end = p.causal && !p.tree_mask ? min_of(position + 1, piece.keys().end) : piece.keys().end;
        const uint8_t* tree =
            p.tree_mask ? p.tree_mask + piece.request() * p.tree_mask_stride_request + token * p.tree_mask_stride_token
                        : nullptr;
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          const int key = first_key + 16 * warp + g + 8 * h;
          bool seen = key >= max_of(begin, piece.keys().begin) && key < end;
          const int draft = key - new_tokens_begin;
          if (tree && seen && draft >= 0) seen = tree[draft / 8] >> (draft % 8) & 1;
          if (!seen) scores[4 * n + 2 * h + i] = -INFINITY;
        }
      }
    }
  }

  // Zeros for the values of keys that no row sees: their probability is zero, but 0 x NaN is not.
  __device__ static void clear_values(uint32_t values, int first_key, const KvRange& keys) {
#pragma unroll 1
    for (int i = threadIdx.x; i < Tr::kUnitBytes / 16; i += Tr::kThreads) {
      const int key = first_key + i / 8 % 64;
      if (key >= keys.begin && key < keys.end) continue;
      asm volatile("st.shared.v4.b32 [%0], {%1, %1, %1, %1};" ::"r"(values + i * 16), "r"(0) : "memory");
    }
  }

  // Turns scores into probabilities in shared memory, visible to the matrix units of all warps, and brings the state up
  // to date. The old reference is tried first, and one barrier then both shows the probabilities and tells whether some
  // row must move it.
  template <bool kFirst>
  __device__ __forceinline__ void soften(const float (&scores)[kScores], uint32_t probs, float* exchange) {
    float added[Tr::kRowTiles][2];
    if constexpr (!kFirst) {
      const float highest = write_probs(scores, probs, added);
      hopper::fence_async_proxy();
      if (!hopper::named_barrier_any(kMultiply, Tr::kThreads, highest > kSlack + Tr::kProbShift)) {
        add(added);
        return;
      }
    }
    move_reference(scores, exchange);
    write_probs(scores, probs, added);
    add(added);
    hopper::fence_async_proxy();
    hopper::named_barrier_sync(kMultiply, Tr::kThreads);
  }

  __device__ __forceinline__ void add(const float (&added)[Tr::kRowTiles][2]) {
#pragma unroll
    for (int n = 0; n < Tr::kRowTiles; ++n) {
#pragma unroll
      for (int i = 0; i < 2; ++i) sum[n][i] += added[n][i];
    }
  }

  // Returns the highest exponent.
  __device__ __forceinline__ float write_probs(const float (&scores)[kScores], uint32_t probs,
                                               float (&added)[Tr::kRowTiles][2]) const {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    float highest = -INFINITY;
    uint32_t packed[Tr::kRowTiles][2];
#pragma unroll
    for (int n = 0; n < Tr::kRowTiles; ++n) {
      float x[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        x[i] = fmaf(scores[4 * n + i], scale, Tr::kProbShift - reference[n][i & 1]);
        highest = fmaxf(highest, x[i]);
        x[i] = exp2_approx(x[i]);
      }
#pragma unroll
      for (int i = 0; i < 2; ++i) added[n][i] = x[i] + x[i + 2];
#pragma unroll
      for (int h = 0; h < 2; ++h) packed[n][h] = hopper::pack_pair<T>(x[2 * h], x[2 * h + 1]);
    }
    if constexpr (Tr::kRowTiles == 1) {
      const uint32_t place = probs + (16 * warp) * 16 + lane * 4;
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        asm volatile("st.shared.b32 [%0], %1;" ::"r"(place + h * 128), "r"(packed[0][h]) : "memory");
      }
    } else {
      const uint32_t place = probs + lane / 16 * (Tr::kTileTokens * 16) + (16 * warp + lane % 16) * 16;
#pragma unroll
      for (int n = 0; n < Tr::kRowTiles; n += 2) {
        const uint32_t four[4] = {packed[n][0], packed[n][1], packed[n + 1][0], packed[n + 1][1]};
        hopper::store_fragment(four, place + n * (Tr::kTileTokens * 16));
      }
    }
    return highest;
  }

  // Moves the reference to the true maximum of what has been seen.
  __device__ __forceinline__ void move_reference(const float (&scores)[kScores], float* exchange) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
#pragma unroll
    for (int n = 0; n < Tr::kRowTiles; ++n) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        float top = scale * fmaxf(scores[4 * n + i], scores[4 * n + 2 + i]);
        top = fmaxf(top, __shfl_xor_sync(~0u, top, 4));
        top = fmaxf(top, __shfl_xor_sync(~0u, top, 8));
        top = fmaxf(top, __shfl_xor_sync(~0u, top, 16));
        if (lane < 4) exchange[warp * Tr::kRows + 8 * n + 2 * lane + i] = top;
      }
    }
    hopper::named_barrier_sync(kMultiply, Tr::kThreads);
#pragma unroll
    for (int n = 0; n < Tr::kRowTiles; ++n) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const float before = reference[n][i];
        float after = before;
#pragma unroll
        for (int w = 0; w < Tr::kWarps; ++w) {
          after = fmaxf(after, exchange[w * Tr::kRows + 8 * n + lane % 4 * 2 + i]);
        }
        const float factor = exp2_approx(before - after);
        reference[n][i] = after;
        sum[n][i] *= factor;
#pragma unroll
        for (int b = 0; b < Tr::kBlocks; ++b) {
          out[b][4 * n + i] *= factor;
          out[b][4 * n + 2 + i] *= factor;
        }
      }
    }
  }

  // The whole sums of the rows, in `sum`.
  __device__ __forceinline__ void add_up(float* exchange) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
#pragma unroll
    for (int n = 0; n < Tr::kRowTiles; ++n) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        float x = sum[n][i];
        x += __shfl_xor_sync(~0u, x, 4);
        x += __shfl_xor_sync(~0u, x, 8);
        x += __shfl_xor_sync(~0u, x, 16);
        if (lane < 4) exchange[warp * Tr::kRows + 8 * n + 2 * lane + i] = x;
      }
    }
    hopper::named_barrier_sync(kMultiply, Tr::kThreads);
#pragma unroll
    for (int n = 0; n < Tr::kRowTiles; ++n) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const float* part = exchange + 8 * n + lane % 4 * 2 + i;
        sum[n][i] = (part[0] + part[Tr::kRows]) + (part[2 * Tr::kRows] + part[3 * Tr::kRows]);
      }
    }
  }
};

}  // namespace attnops::xqa_decode::sm90
