#pragma once
#include "device/sm90/wgmma_rows_registers.cuh"
#include "xqa_decode/sm90/row_block.cuh"

namespace attnops::xqa_decode::sm90 {

// One warpgroup of several, which have rows of their own.
template <class Tr>
struct OneGroup : Tr {
  static constexpr int kRows = Tr::kGroupRows;
  static constexpr int kRowTiles = kRows / 8;
};

// What RowBlock is for few rows, for 64: query rows are the M of both products, keys and output dims their N. A row
// then lies in four lanes of one warp, and its probabilities go from the registers of the first product to those of the
// second: warps need neither shared memory nor barriers for them.
// In a lane with g = lane / 4, t = lane % 4 of warp w:
//   scores[4 n + 2 h + i]: row 16 w + g + 8 h, key 8 n + 2 t + i of the tile;
//   out[b][4 n + 2 h + i]: the same row, dim 64 b + 8 n + 2 t + i.
// Sums are those of a lane's own keys until `add_up`.
template <class Tr>
struct WideBlock {
  using T = typename Tr::T;
  using Narrow = RowBlock<OneGroup<Tr>>;
  using Descriptor = typename Narrow::Descriptor;
  static_assert(Tr::kGroupRows == 64 && Tr::kTileTokens == 64);
  static constexpr int kScores = 32;
  static constexpr bool kEdgesOutOfLine = true;
  // Whether softmax may run beside the product with the values before. Two groups that share a ring are 2 to 4 % slower
  // with it: each is busy while the other waits.
  static constexpr bool kOverlaps = Tr::kGroups == 1;
  static constexpr int kSteps = Tr::kTileTokens / 16;  // of the second product

  float out[Tr::kBlocks][kScores];
  float reference[2];  // in units of log2; kNothingSeen before the first visible key
  float sum[2];
  uint32_t probs[kSteps][4];                             // of the tile at hand, the second product's operand
  static constexpr int kQuerySteps = Tr::kHeadDim / 16;  // of the first product
  uint32_t query[Tr::kKeepsQueries ? kQuerySteps : 1][4];
  // Of raw scores, to units of log2, and what is left of it when scores become probabilities. Over e4m3 pages rows g
  // and g + 8 have their own.
  static constexpr int kScales = Tr::kFp8 ? 2 : 1;
  float score_scale[kScales], scale[kScales];
  bool tail;  // whether rows have the last columns

  __device__ __forceinline__ void begin(float to_log2, float logit_cap) {
    score_scale[0] = to_log2;
    scale[0] = logit_cap == 0.f && to_log2 > 0.f ? to_log2 : 1.f;
    clear();
  }

  __device__ __forceinline__ void clear() {
#pragma unroll
    for (int b = 0; b < Tr::kBlocks; ++b) {
#pragma unroll
      for (int i = 0; i < kScores; ++i) out[b][i] = 0.f;
    }
#pragma unroll
    for (int h = 0; h < 2; ++h) reference[h] = Narrow::kNothingSeen, sum[h] = 0.f;
  }

  // The queries stay in registers where there is room: as an operand in shared memory they would be read again for
  // every tile, as many bytes as its keys.
  __device__ __forceinline__ void load_queries(uint32_t queries) {
    const int warp = threadIdx.x / 32 % Tr::kWarps, lane = threadIdx.x % 32;
#pragma unroll
    for (int k = 0; k < kQuerySteps; ++k) {
      const int at = hopper::swizzled(16 * warp + lane % 16, k % 4 * 2 + lane / 16);
      hopper::load_fragment(query[k], queries + k / 4 * hopper::kTileBytes + at);
    }
  }

  // scores = queries x keys^T, in flight. Jumps within a product would take it apart: so there are two.
  __device__ __forceinline__ void multiply_keys(uint32_t keys, uint32_t queries, float (&scores)[kScores]) {
    if (Tr::kTail > 0 && !tail) {
      multiply_columns<Tr::kHeadDim - Tr::kTail>(keys, queries, scores);
    } else {
      multiply_columns<Tr::kHeadDim>(keys, queries, scores);
    }
  }
  template <int kColumns>
  __device__ __forceinline__ void multiply_columns(uint32_t keys, uint32_t queries, float (&scores)[kScores]) {
    if constexpr (!Tr::kKeepsQueries) {
      Narrow::template multiply_keys<kColumns>(queries, keys, scores);  // both have 64 rows
    } else {
      const Descriptor key(hopper::operand_descriptor(keys));
      hopper::wgmma_fence();
#pragma unroll
      for (int k = 0; k < kColumns / 16; ++k) {
        hopper::wgmma_rows<T, 0>(scores, query[k],
                                 key.at(k / 4 * (hopper::kTileBytes >> 4) + k % 4 * hopper::kStepKMajor), k > 0);
      }
      hopper::wgmma_commit();
    }
  }

  // out += probabilities x values, in flight.
  __device__ __forceinline__ void multiply_values(uint32_t values, uint32_t) {
    pin_operands();
    hopper::wgmma_fence();
    multiply_pinned_values(values);
  }

  // Registers of the product with values are not written from here on.
  __device__ __forceinline__ void pin_operands() {
#pragma unroll
    for (int k = 0; k < kSteps; ++k) hopper::pin(probs[k]);
#pragma unroll
    for (int b = 0; b < Tr::kBlocks; ++b) hopper::pin(out[b]);
  }

  // The same behind `pin_operands` and another product.
  __device__ __forceinline__ void multiply_pinned_values(uint32_t values) {
    const Descriptor value(hopper::operand_descriptor(values));
#pragma unroll
    for (int k = 0; k < kSteps; ++k) {
#pragma unroll
      for (int b = 0; b < Tr::kBlocks; ++b) {
        hopper::wgmma_rows<T, 1>(out[b], probs[k], value.at(b * (hopper::kTileBytes >> 4) + k * hopper::kStepMnMajor),
                                 1);
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
#pragma unroll
    for (int k = 0; k < kSteps; ++k) hopper::pin(probs[k]);
  }

  // Whether scores are scaled and capped before they become probabilities. A positive scale alone waits for the
  // exponent's subtraction: both are one instruction there.
  __device__ __forceinline__ bool scales_apart() const { return scale[0] != score_scale[0]; }

  // The same where there is no tree: a row sees a range of keys.
  template <class Piece>
  __device__ __forceinline__ static void mask_ranges(const MaskRules& rules, const Piece& piece, int first_row,
                                                     int first_key, float (&scores)[kScores]) {
    const int own_row = first_row + threadIdx.x / 32 % Tr::kWarps * 16 + threadIdx.x % 32 / 4;
    const int own_key = first_key + threadIdx.x % 4 * 2;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const RowMask mask(rules, rules, piece, own_row + 8 * h);
      const int begin = mask.begin - own_key, end = mask.end - own_key;
#pragma unroll
      for (int n = 0; n < kScores / 4; ++n) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          if (8 * n + i < begin || 8 * n + i >= end) scores[4 * n + 2 * h + i] = -INFINITY;
        }
      }
    }
  }

  // Hides the keys that a row may not see; the rules are those of the reference.
  template <class Piece>
  __device__ __forceinline__ static void mask_scores(const MaskRules& rules, const Piece& piece, int first_row,
                                                     int first_key, float (&scores)[kScores]) {
    const int own_row = first_row + threadIdx.x / 32 % Tr::kWarps * 16 + threadIdx.x % 32 / 4;
    const int own_key = first_key + threadIdx.x % 4 * 2;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const RowMask mask(rules, rules, piece, own_row + 8 * h);
#pragma unroll
      for (int n = 0; n < kScores / 4; ++n) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          const int key = own_key + 8 * n + i;
          if (!mask.in_range(key)) scores[4 * n + 2 * h + i] = -INFINITY;
        }
      }
      if (mask.tree == nullptr) continue;
      const int window_begin = mask.window_begin(rules);
      const uint64_t seen = seen_drafts(mask.tree, rules.tree_keys, own_key - mask.first_draft);
      static_assert(kScores / 4 * 8 <= 64);
#pragma unroll
      for (int n = 0; n < kScores / 4; ++n) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          if (!(seen >> (8 * n + i) & 1) || own_key + 8 * n + i < window_begin) scores[4 * n + 2 * h + i] = -INFINITY;
        }
      }
    }
  }

  // Zeros for the values of keys that no row sees, in all warps' view.
  __device__ static void clear_values(uint32_t values, uint64_t seen) {
    Narrow::clear_values(values, seen);
    hopper::fence_async_proxy();
    sync_group<Tr>();
  }

  // Turns scores into probabilities and brings the state up to date, when no product is in flight. The old reference is
  // tried first where most tiles come this way: only when some row of the warp grew far beyond it the warp moves it.
  template <bool kFirst>
  __device__ __forceinline__ void soften(const float (&scores)[kScores], uint32_t, float*) {
    if constexpr (!kFirst && !kOverlaps) {
      const float before[2] = {sum[0], sum[1]};
      if (!__any_sync(~0u, take_probs(scores) > kSlack + Tr::kProbShift)) return;
      sum[0] = before[0], sum[1] = before[1];
    }
    move_reference<kFirst>(scores);
    take_probs(scores);
  }

  // The same while the product with the values before is in flight, of scores, `x`, that no mask or soft cap changed.
  // The old reference is tried first: only when some row of the warp grew far beyond it, or has none, the warp moves
  // it. The operand's registers, and `out`, change behind `wait`, which is for that product.
  template <class Wait>
  __device__ __forceinline__ void soften_early(float (&x)[kScores], const Wait& wait) {
    const bool seen[2] = {reference[0] > kNothingSeen, reference[1] > kNothingSeen};
    const float base[2] = {seen[0] ? reference[0] : 0.f, seen[1] ? reference[1] : 0.f};
    const float shift[2] = {Tr::kProbShift - base[0], Tr::kProbShift - base[1]};
    float highest = -INFINITY;
#pragma unroll
    for (int i = 0; i < kScores; ++i) {
      x[i] = fmaf(x[i], scale[i / 2 % kScales], shift[i / 2 & 1]);
      highest = fmaxf(highest, x[i]);
    }
    float top[2] = {0.f, 0.f};
    const bool moves = __any_sync(~0u, highest > kSlack + Tr::kProbShift || !seen[0] || !seen[1]);
    if (moves) {
#pragma unroll
      for (int h = 0; h < 2; ++h) top[h] = seen[h] ? Tr::kProbShift : kNothingSeen;
#pragma unroll
      for (int i = 0; i < kScores; ++i) top[i / 2 & 1] = fmaxf(top[i / 2 & 1], x[i]);
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        top[h] = whole_max(top[h]) - Tr::kProbShift;
        reference[h] = max_of(base[h] + top[h], kNothingSeen);
      }
#pragma unroll
      for (int i = 0; i < kScores; ++i) x[i] -= top[i / 2 & 1];
    }
    const float factor[2] = {seen[0] ? exp2_approx(-top[0]) : 1.f, seen[1] ? exp2_approx(-top[1]) : 1.f};
    sum[0] *= factor[0], sum[1] *= factor[1];
#pragma unroll
    for (int i = 0; i < kScores; ++i) {
      x[i] = exp2_approx(x[i]);
      sum[i / 2 & 1] += x[i];
    }
    hopper::pin(x);
    wait();
#pragma unroll
    for (int i = 0; i < kScores; i += 2) probs[i / 8][i / 2 % 4] = hopper::pack_pair<T>(x[i], x[i + 1]);
    if (moves) scale_out(factor);
  }

  // The whole sums of the rows, in `sum`. All warps are then done with the queries.
  __device__ __forceinline__ void add_up(float*) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      sum[h] += __shfl_xor_sync(~0u, sum[h], 1);
      sum[h] += __shfl_xor_sync(~0u, sum[h], 2);
    }
    sync_group<Tr>();
  }

 private:
  static constexpr float kNothingSeen = Narrow::kNothingSeen;

  // Returns the highest exponent.
  __device__ __forceinline__ float take_probs(const float (&scores)[kScores]) {
    float highest = -INFINITY;
    const float shift[2] = {Tr::kProbShift - reference[0], Tr::kProbShift - reference[1]};
#pragma unroll
    for (int pair = 0; pair < kScores / 2; ++pair) {
      float x[2];
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        x[i] = fmaf(scores[2 * pair + i], scale[pair % kScales], shift[pair & 1]);
        highest = fmaxf(highest, x[i]);
        x[i] = exp2_approx(x[i]);
      }
      sum[pair & 1] += x[0] + x[1];
      probs[pair / 4][pair % 4] = hopper::pack_pair<T>(x[0], x[1]);
    }
    return highest;
  }

  // Of a row's four lanes.
  __device__ __forceinline__ static float whole_max(float top) {
    top = fmaxf(top, __shfl_xor_sync(~0u, top, 1));
    return fmaxf(top, __shfl_xor_sync(~0u, top, 2));
  }

  __device__ __forceinline__ void scale_out(const float (&factor)[2]) {
#pragma unroll
    for (int b = 0; b < Tr::kBlocks; ++b) {
#pragma unroll
      for (int i = 0; i < kScores; ++i) out[b][i] *= factor[i / 2 & 1];
    }
  }

  // Moves the reference to the true maximum of what has been seen; kFirst: there are no sums yet.
  template <bool kFirst>
  __device__ __forceinline__ void move_reference(const float (&scores)[kScores]) {
    float factor[2];
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      float top = -INFINITY;
#pragma unroll
      for (int n = 0; n < kScores / 4; ++n) top = fmaxf(top, fmaxf(scores[4 * n + 2 * h], scores[4 * n + 2 * h + 1]));
      const float after = fmaxf(reference[h], scale[h % kScales] * whole_max(top));
      factor[h] = exp2_approx(reference[h] - after);
      reference[h] = after, sum[h] *= factor[h];
    }
    if constexpr (!kFirst) scale_out(factor);
  }
};

}  // namespace attnops::xqa_decode::sm90
