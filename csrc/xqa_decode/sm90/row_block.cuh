#pragma once
#include <cmath>

#include "device/sm90/shared_words.cuh"
#include "xqa_decode/sm90/row_state.cuh"

namespace attnops::xqa_decode::sm90 {

// The state of a pass's query rows over one piece, and what a tile of keys does to it: all operands of the products
// come from shared memory. In a lane with g = lane / 4, t = lane % 4 of warp w, out[b][4 n + 2 h + i] is of dim 64 b +
// 16 w + g + 8 h and row 8 n + 2 t + i.
template <class Tr>
struct RowBlock : RowState<Tr> {
  using T = typename Tr::T;
  using State = RowState<Tr>;
  using State::kScores;
  using State::out;
  using State::sum;

  static constexpr bool kEdgesOutOfLine = false;

  float score_scale;  // of raw scores, to units of log2
  float scale;        // what is left of it when scores become probabilities

  __device__ __forceinline__ void begin(float to_log2, float logit_cap) {
    score_scale = to_log2;
    scale = logit_cap == 0.f && to_log2 > 0.f ? to_log2 : 1.f;
    State::clear();
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
    cap_scores(score_scale, logit_cap, scores);
  }

  __device__ __forceinline__ static void cap_scores(float score_scale, float logit_cap, float (&scores)[kScores]) {
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

  // Zeros for the values of keys that no row sees: their probability is zero, but 0 x NaN is not.
  __device__ static void clear_values(uint32_t values, uint64_t seen) {
    const int thread = threadIdx.x % Tr::kGroupThreads;
    seen >>= thread / 8;
#pragma unroll
    for (int step = 0; step < 4; ++step) {
      if (seen >> 16 * step & 1) continue;
#pragma unroll
      for (int column = 0; column < Tr::kColumns; ++column) {
        const uint32_t at = values + column * hopper::kTileBytes + step * 2048 + thread * 16;
        hopper::clear_words(at);
      }
    }
  }

  // See RowState::soften.
  template <bool kFirst>
  __device__ __forceinline__ void soften(const float (&scores)[kScores], uint32_t probs, float* exchange) {
    struct OneScale {
      float all;
      __device__ __forceinline__ float at(int, int) const { return all; }
    };
    const GroupPlace me = place(exchange);
    State::soften(kFirst, scores, OneScale{scale}, probs + State::prob_offset(me.warp, me.lane), kMultiply,
                  [&] { return me; });
  }

  // The whole sums of the rows, in `sum`.
  __device__ __forceinline__ void add_up(float* exchange) {
    const GroupPlace me = place(exchange);
    State::share_sums(me);
    hopper::named_barrier_sync(kMultiply, Tr::kThreads);
#pragma unroll
    for (int n = 0; n < Tr::kRowTiles; ++n) {
#pragma unroll
      for (int i = 0; i < 2; ++i) sum[n][i] = State::whole_sum(exchange, 8 * n + me.lane % 4 * 2 + i);
    }
  }

 private:
  __device__ __forceinline__ static GroupPlace place(float* exchange) {
    return {static_cast<int>(threadIdx.x / 32), static_cast<int>(threadIdx.x % 32), exchange};
  }
};

}  // namespace attnops::xqa_decode::sm90
