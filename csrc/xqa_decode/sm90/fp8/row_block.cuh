#pragma once
#include "device/sm90/barrier.cuh"
#include "device/sm90/wgmma_rows_registers.cuh"
#include "xqa_decode/sm90/fp8/fragments.cuh"
#include "xqa_decode/sm90/row_block.cuh"

namespace attnops::xqa_decode::sm90::fp8 {

// Hides how a value came about. What is seldom needed is computed where it is, not held in a register throughout.
template <typename T>
__device__ __forceinline__ T opaque(T value) {
  asm volatile("" : "+r"(value));
  return value;
}

// Who a thread is among those that multiply.
struct Thread {
  int group, warp, lane;  // warp: of the group

  __device__ __forceinline__ Thread() {
    int thread;
    asm volatile("mov.b32 %0, %%tid.x;" : "=r"(thread));
    group = thread / 128, warp = thread / 32 % 4, lane = thread % 32;
  }
};

// The state that a group has of the query rows over its tiles of one piece. Both products are transposed, as in
// sm90/row_block.cuh, but the long sides, keys and output dims, come from registers, where e4m3 becomes fp16. In a lane
// with g = lane / 4, t = lane % 4 of warp w:
//   scores[4 n + 2 h + i]: key 16 w + g + 8 h of the tile, row 8 n + 2 t + i;
//   out[b][4 n + 2 h + i]: dim 64 b + 16 w + 2 g + h, the same row.
// All warps of a group hold the same reference maxima; sums are those of a lane's own keys.
template <class Tr>
struct RowBlock {
  static constexpr int kScores = Tr::kRows / 2;
  using Scores = float[kScores];
  using Descriptor = typename sm90::RowBlock<Tr>::Descriptor;

  float out[2][kScores];
  float reference[Tr::kRowTiles][2];  // in units of log2
  float sum[Tr::kRowTiles][2];

  static constexpr float kNothingSeen = -1e30f;  // finite, so that it can be subtracted from a hidden key's -inf

  __device__ __forceinline__ void begin() {
#pragma unroll
    for (int i = 0; i < kScores; ++i) out[0][i] = out[1][i] = 0.f;
#pragma unroll
    for (int n = 0; n < Tr::kRowTiles; ++n) {
#pragma unroll
      for (int i = 0; i < 2; ++i) reference[n][i] = kNothingSeen, sum[n][i] = 0.f;
    }
  }

  // What scores must be multiplied by, of a lane's rows. It lies in shared memory: registers are short.
  struct Scale {
    float row[Tr::kRowTiles][2];

    __device__ __forceinline__ explicit Scale(uint32_t scales) {
#pragma unroll
      for (int n = 0; n < Tr::kRowTiles; ++n) {
        asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];" : "=f"(row[n][0]), "=f"(row[n][1]) : "r"(scales + n * 32));
      }
    }
  };

  // Operands in registers.
  static constexpr bool kHalves = Tr::kHalves;
  using Keys = uint32_t[kHalves ? 4 : 8][4];
  using Values = Keys;

  // scores = keys x queries^T, in flight, or the second half of it.
  __device__ __forceinline__ static void multiply_keys(const uint32_t (&raw)[4][4], uint32_t queries, Keys& a,
                                                       Scores& scores) {
    const Descriptor query(hopper::operand_descriptor(queries));
    constexpr int kSteps = kHalves ? 4 : 8;
#pragma unroll
    for (int first = 0; first < 8; first += kSteps) {
      if (first > 0) hopper::wgmma_wait<0>(scores);
#pragma unroll
      for (int k = 0; k < kSteps; k += 2) convert_keys(raw[(first + k) / 2], a[k], a[k + 1]);
      pin(a);
      hopper::wgmma_fence();
#pragma unroll
      for (int k = 0; k < kSteps; ++k) {
        const int step = first + k;
        hopper::wgmma_rows<0>(scores, a[k],
                              query.at(step / 4 * (Tr::kRows * 128 >> 4) + step % 4 * hopper::kStepKMajor), step > 0);
      }
      hopper::wgmma_commit();
    }
  }

  // out += values^T x probabilities, in flight, or the second half of it.
  __device__ __forceinline__ void multiply_values(const uint32_t (&raw)[4][4], uint32_t probs, Values& a) {
    const Descriptor prob(hopper::plain_descriptor(probs, Tr::kTileTokens * 16));
    if constexpr (kHalves) {
#pragma unroll
      for (int b = 0; b < 2; ++b) {
        if (b > 0) hopper::wgmma_wait<0>(out[0]);
        convert_values(raw[2 * b], a[0], a[1]);
        convert_values(raw[2 * b + 1], a[2], a[3]);
        pin(a);
        hopper::wgmma_fence();
#pragma unroll
        for (int k = 0; k < 4; ++k) hopper::wgmma_rows<1>(out[b], a[k], prob.at(k * hopper::kStepPlain), 1);
        hopper::wgmma_commit();
      }
    } else {
#pragma unroll
      for (int i = 0; i < 4; ++i) convert_values(raw[i], a[2 * i], a[2 * i + 1]);
      pin(a);
      hopper::wgmma_fence();
#pragma unroll
      for (int k = 0; k < 4; ++k) {
#pragma unroll
        for (int b = 0; b < 2; ++b) hopper::wgmma_rows<1>(out[b], a[4 * b + k], prob.at(k * hopper::kStepPlain), 1);
      }
      hopper::wgmma_commit();
    }
  }

  // Until at most kPending newer products are in flight.
  template <int kPending>
  __device__ __forceinline__ void wait_for_values() {
    hopper::wgmma_wait<kPending>(out[0], out[1]);
  }

  // Soft cap, and scales that do not join the exponent.
  __device__ __forceinline__ static void scale_scores(float logit_cap, const Scale& scale, Scores& scores) {
    const float to_cap = 2.f / logit_cap;  // tanh(x) = 1 - 2 / (1 + e^2x), and the scores are in log2 already
    const float from_cap = logit_cap * kLog2e;
#pragma unroll
    for (int i = 0; i < kScores; ++i) {
      scores[i] *= scale.row[i / 4][i % 2];
      if (logit_cap != 0.f) scores[i] = from_cap * (1.f - __fdividef(2.f, 1.f + exp2_approx(scores[i] * to_cap)));
    }
  }

  // Zeros for the values of keys that no row sees: their probability is zero, but 0 x NaN is not.
  __device__ static void clear_values(uint32_t values, int first_key, const KvRange& keys) {
#pragma unroll 1
    for (int i = threadIdx.x % Tr::kGroupThreads; i < Tr::kUnitBytes / 16; i += Tr::kGroupThreads) {
      const int key = first_key + i / 8;
      if (key >= keys.begin && key < keys.end) continue;
      asm volatile("st.shared.v4.b32 [%0], {%1, %1, %1, %1};" ::"r"(values + i * 16), "r"(0) : "memory");
    }
  }

  // Turns scores into probabilities in shared memory, visible to the matrix units of the group's warps, and brings the
  // state up to date. The old reference is tried first, and one barrier then both shows the probabilities and tells
  // whether some row must move it.
  // `place` is the lane's in the probabilities.
  __device__ __forceinline__ void soften(bool first, const Scores& scores, const Scale& scale, uint32_t place,
                                         int barrier, float* exchange) {
    float added[Tr::kRowTiles][2];
    if (!first) {
      const float highest = write_probs(scores, scale, place, added);
      hopper::fence_async_proxy();
      if (!hopper::named_barrier_any(barrier, Tr::kGroupThreads, highest > kSlack + Tr::kProbShift)) {
        add(added);
        return;
      }
    }
    move_reference(scores, scale, barrier, exchange);
    write_probs(scores, scale, place, added);
    add(added);
    hopper::fence_async_proxy();
    hopper::named_barrier_sync(barrier, Tr::kGroupThreads);
  }

  // Where a lane's probabilities begin in a buffer of them.
  __device__ __forceinline__ static uint32_t prob_offset(const Thread& me) {
    const int keys = 16 * me.warp * 16;
    return Tr::kRowTiles == 1 ? keys + me.lane * 4 : keys + me.lane / 16 * (Tr::kTileTokens * 16) + me.lane % 16 * 16;
  }

  // Puts both groups' results together: `out[0]` is then this group's block of the output, dims 64 * group .., and
  // `sum` whole. Called by both. `swap`, `exchange` and `references` as in SharedLayout.
  __device__ __forceinline__ void combine(float* swap, float* exchange, float* references) {
    const Thread me;
    const int thread = threadIdx.x % Tr::kGroupThreads, rows_of_group = Tr::kWarps * Tr::kRows;
#pragma unroll
    for (int i = 0; i < kScores; ++i) {
      swap[(me.group * kScores + i) * Tr::kGroupThreads + thread] = me.group == 0 ? out[1][i] : out[0][i];
    }
#pragma unroll
    for (int n = 0; n < Tr::kRowTiles; ++n) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        float x = sum[n][i];
        x += __shfl_xor_sync(~0u, x, 4);
        x += __shfl_xor_sync(~0u, x, 8);
        x += __shfl_xor_sync(~0u, x, 16);
        if (me.lane >= 4) continue;
        const int row = 8 * n + 2 * me.lane + i;
        exchange[me.group * rows_of_group + me.warp * Tr::kRows + row] = x;
        if (me.warp == 0) references[me.group * Tr::kRows + row] = reference[n][i];
      }
    }
    hopper::named_barrier_sync(kAll, Tr::kThreads);
#pragma unroll
    for (int n = 0; n < Tr::kRowTiles; ++n) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int row = 8 * n + me.lane % 4 * 2 + i, other = 1 - me.group;
        const auto whole_sum = [&](int group) {
          const float* part = exchange + group * rows_of_group + row;
          return (part[0] + part[Tr::kRows]) + (part[2 * Tr::kRows] + part[3 * Tr::kRows]);
        };
        const float own_sum = whole_sum(me.group), other_sum = whole_sum(other);
        const float other_reference = references[other * Tr::kRows + row];
        const float top = fmaxf(reference[n][i], other_reference);
        const float own_factor = exp2_approx(reference[n][i] - top), factor = exp2_approx(other_reference - top);
        reference[n][i] = top;
        sum[n][i] = add_products(own_factor, own_sum, factor, other_sum);
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          const int at = 4 * n + 2 * h + i;
          const float mine = me.group == 0 ? out[0][at] : out[1][at];
          const float others = swap[(other * kScores + at) * Tr::kGroupThreads + thread];
          // A group that saw no key of this row may hold NaN there, from keys of other rows: select.
          out[0][at] = add_products(own_factor, own_sum == 0.f ? 0.f : mine, factor, other_sum == 0.f ? 0.f : others);
        }
      }
    }
  }

 private:
  // The same bits whichever group calls it.
  __device__ __forceinline__ static float add_products(float a, float x, float b, float y) {
    return __fadd_rn(__fmul_rn(a, x), __fmul_rn(b, y));
  }

  template <int kCount>
  __device__ __forceinline__ static void pin(uint32_t (&a)[kCount][4]) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) hopper::pin(a[i]);
  }

  __device__ __forceinline__ void add(const float (&added)[Tr::kRowTiles][2]) {
#pragma unroll
    for (int n = 0; n < Tr::kRowTiles; ++n) {
#pragma unroll
      for (int i = 0; i < 2; ++i) sum[n][i] += added[n][i];
    }
  }

  // Returns the highest exponent.
  __device__ __forceinline__ float write_probs(const Scores& scores, const Scale& scale, uint32_t place,
                                               float (&added)[Tr::kRowTiles][2]) const {
    float highest = -INFINITY;
    uint32_t packed[Tr::kRowTiles][2];
#pragma unroll
    for (int n = 0; n < Tr::kRowTiles; ++n) {
      float x[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        x[i] = fmaf(scores[4 * n + i], scale.row[n][i & 1], Tr::kProbShift - reference[n][i & 1]);
        highest = fmaxf(highest, x[i]);
        x[i] = exp2_approx(x[i]);
      }
#pragma unroll
      for (int i = 0; i < 2; ++i) added[n][i] = x[i] + x[i + 2];
#pragma unroll
      for (int h = 0; h < 2; ++h) packed[n][h] = hopper::pack_pair<__half>(x[2 * h], x[2 * h + 1]);
    }
    if constexpr (Tr::kRowTiles == 1) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        asm volatile("st.shared.b32 [%0], %1;" ::"r"(place + h * 128), "r"(packed[0][h]) : "memory");
      }
    } else {
      const uint32_t four[4] = {packed[0][0], packed[0][1], packed[1][0], packed[1][1]};
      hopper::store_fragment(four, place);
    }
    return highest;
  }

  // Moves the reference to the true maximum of what the group has seen.
  __device__ __forceinline__ void move_reference(const Scores& scores, const Scale& scale, int barrier,
                                                 float* exchange) {
    const Thread me;
    float* own = exchange + me.group * (Tr::kWarps * Tr::kRows);
#pragma unroll
    for (int n = 0; n < Tr::kRowTiles; ++n) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        float top = scale.row[n][i] * fmaxf(scores[4 * n + i], scores[4 * n + 2 + i]);
        top = fmaxf(top, __shfl_xor_sync(~0u, top, 4));
        top = fmaxf(top, __shfl_xor_sync(~0u, top, 8));
        top = fmaxf(top, __shfl_xor_sync(~0u, top, 16));
        if (me.lane < 4) own[me.warp * Tr::kRows + 8 * n + 2 * me.lane + i] = top;
      }
    }
    hopper::named_barrier_sync(barrier, Tr::kGroupThreads);
#pragma unroll
    for (int n = 0; n < Tr::kRowTiles; ++n) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const float before = reference[n][i];
        float after = before;
#pragma unroll
        for (int w = 0; w < Tr::kWarps; ++w) after = fmaxf(after, own[w * Tr::kRows + 8 * n + me.lane % 4 * 2 + i]);
        const float factor = exp2_approx(before - after);
        reference[n][i] = after;
        sum[n][i] *= factor;
#pragma unroll
        for (int b = 0; b < 2; ++b) {
          out[b][4 * n + i] *= factor;
          out[b][4 * n + 2 + i] *= factor;
        }
      }
    }
  }
};

}  // namespace attnops::xqa_decode::sm90::fp8
