#pragma once
#include "device/sm90/gmma.cuh"
#include "xqa_decode/sm90/wide_block.cuh"

namespace attnops::xqa_decode::sm90 {

// What WideBlock is for 64 rows, for each of two warpgroups that share the tiles of a ring and take turns: one computes
// probabilities while the other multiplies. Products are as wide as a tile of keys, or as a head.
template <class Tr>
struct TurnBlock : WideRows<Tr> {
  using Rows = WideRows<Tr>;
  using Rows::out, Rows::reference, Rows::sum, Rows::kNothingSeen;
  using T = typename Tr::T;
  static_assert(Tr::kGroups == 2 && Tr::kGroupRows == 64 && !Tr::kFp8);
  static constexpr int kScores = Tr::kTileTokens / 2;
  static constexpr bool kEdgesOutOfLine = true;
  static constexpr int kSteps = Tr::kTileTokens / 16;  // of the second product

  uint32_t probs[kSteps][4];  // of the tile at hand, the second product's operand
  float score_scale[1];       // of raw scores, to units of log2
  float scale[1];             // what is left of it when scores become probabilities

  __device__ __forceinline__ void begin(float to_log2, float logit_cap) {
    score_scale[0] = to_log2;
    scale[0] = logit_cap == 0.f && to_log2 > 0.f ? to_log2 : 1.f;
    Rows::clear();
  }

  // See WideBlock.
  __device__ __forceinline__ bool scales_apart() const { return scale[0] != score_scale[0]; }

  // scores = queries x keys^T, in flight, of the first kKeys of a tile.
  template <int kKeys>
  __device__ __forceinline__ void multiply_keys(uint32_t keys, uint32_t queries, float (&scores)[kScores]) const {
    const uint32_t query = hopper::chunk_operand<Tr::kGroupRows>(queries);
    const uint32_t key = hopper::chunk_operand<Tr::kTileTokens>(keys);
    hopper::wgmma_fence();
#pragma unroll
    for (int k = 0; k < Tr::kHeadDim / 16; ++k) {
      const int inside = k % 4 * hopper::kStepKMajor;
      hopper::gmma_columns<T, hopper::kRowsAreN, kKeys>(
          scores, hopper::chunk_descriptor(query + (k / 4 * (Tr::kGroupRows * 128) >> 4) + inside),
          hopper::chunk_descriptor(key + (k / 4 * Tr::kColumnBytes >> 4) + inside), k > 0);
    }
    hopper::wgmma_commit();
  }

  // out += probabilities x values, in flight, of the first kKeys of a tile.
  template <int kKeys>
  __device__ __forceinline__ void multiply_values(uint32_t values) {
    const uint32_t value = hopper::chunk_operand<Tr::kTileTokens>(values);
    hopper::wgmma_fence();  // the assembler packs probabilities behind the fence before the scores
#pragma unroll
    for (int k = 0; k < kKeys / 16; ++k) {
      hopper::gmma<T, hopper::kRowsAreK>(out, probs[k], hopper::chunk_descriptor(value + k * hopper::kStepMnMajor),
                                         true);
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

  // Turns the first kCount scores, `x`, into probabilities and brings the state up to date. The old reference is tried
  // first: only when some row of the warp grew far beyond it, or has none, the warp moves it. The operand's registers,
  // and `out`, change behind `wait`, which is for the product with the values before. It is told what is never so, by
  // the sums.
  template <int kCount, class Wait>
  __device__ __forceinline__ void soften(float (&x)[kScores], const Wait& wait) {
    const bool seen[2] = {reference[0] > kNothingSeen, reference[1] > kNothingSeen};
    const float base[2] = {seen[0] ? reference[0] : 0.f, seen[1] ? reference[1] : 0.f};
    const float shift[2] = {Tr::kProbShift - base[0], Tr::kProbShift - base[1]};
#pragma unroll
    for (int i = 0; i < kCount; ++i) x[i] = fmaf(x[i], scale[0], shift[i / 2 & 1]);
    // Positive floats are ordered like their bits, and negative ones are below them. Three are compared at once.
    int highest[2] = {0, 0};
#pragma unroll
    for (int i = 0; i < kCount; i += 2) {
      int& top = highest[i / 2 & 1];
      top = __vimax3_s32(top, __float_as_int(x[i]), __float_as_int(x[i + 1]));
    }
    const bool grows = max_of(highest[0], highest[1]) > __float_as_int(kSlack + Tr::kProbShift);
    const bool moves = __any_sync(~0u, grows || !seen[0] || !seen[1]);
    float factor[2] = {1.f, 1.f};
    if (moves) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        float top = seen[h] ? Tr::kProbShift : kNothingSeen;
#pragma unroll
        for (int i = 2 * h; i < kCount; i += 4) top = fmaxf(top, fmaxf(x[i], x[i + 1]));
        top = Rows::whole_max(top) - Tr::kProbShift;
        reference[h] = max_of(base[h] + top, kNothingSeen);
        factor[h] = seen[h] ? exp2_approx(-top) : 1.f;
        sum[h] *= factor[h];
#pragma unroll
        for (int i = 2 * h; i < kCount; i += 4) x[i] -= top, x[i + 1] -= top;
      }
    }
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      x[i] = exp2_approx(x[i]);
      sum[i / 2 & 1] += x[i];
    }
    wait(sum[0] + sum[1] < 0.f);
    if (moves) Rows::scale_out(factor);
#pragma unroll
    for (int i = 0; i < kCount; i += 2) probs[i / 8][i / 2 % 4] = hopper::pack_pair<T>(x[i], x[i + 1]);
  }
};

}  // namespace attnops::xqa_decode::sm90
