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

// Who a thread is among those that multiply for a head.
template <class Tr>
struct Thread {
  int group, warp, lane;  // warp: of the group

  __device__ __forceinline__ Thread() {
    int thread;
    asm volatile("mov.b32 %0, %%tid.x;" : "=r"(thread));
    group = Tr::kHeads == 1 ? thread / 128 : thread / 128 % Tr::kGroups, warp = thread / 32 % 4, lane = thread % 32;
  }
};

// A thread's number among those of its KV head.
template <class Tr>
__device__ __forceinline__ unsigned own_thread() {
  return Tr::kHeads == 1 ? threadIdx.x : threadIdx.x % Tr::kThreads;
}

// The first of the hardware's barriers that are a head's.
template <class Tr>
__device__ __forceinline__ int first_barrier() {
  return Tr::kHeads == 1 ? 0 : threadIdx.x / Tr::kThreads * 4;
}

// Both groups of a head meet, at one barrier that they pass twice. Once would do: but groups come here after different
// numbers of their own barriers, and racecheck, which counts barriers, then takes ordered accesses for races
// (docs/sanitizer.md). The second time costs 20 ns.
template <class Tr>
__device__ __forceinline__ void sync_head() {
#pragma unroll
  for (int i = 0; i < 2; ++i) hopper::named_barrier_sync(kAll + first_barrier<Tr>(), Tr::kThreads);
}

// The threads that merge a head's works.
template <class Tr>
struct MergingHead {
  static constexpr int kThreads = Tr::kThreads;
  static __device__ __forceinline__ unsigned thread() { return own_thread<Tr>(); }
  static __device__ __forceinline__ void sync() { sync_head<Tr>(); }
};

// The state that a group has of the query rows over its tiles of one piece, as in sm90/row_block.cuh, but the long
// sides of both products, keys and output dims, come from registers, where e4m3 becomes fp16. In a lane with
// g = lane / 4, t = lane % 4 of warp w, out[b][4 n + 2 h + i] is of dim 64 b + 16 w + 2 g + h and row 8 n + 2 t + i.
template <class Tr>
struct RowBlock : RowState<Tr> {
  using State = RowState<Tr>;
  using State::kScores;
  using State::out;
  using State::reference;
  using State::sum;
  using typename State::Scores;
  using Descriptor = typename sm90::RowBlock<Tr>::Descriptor;

  // What scores must be multiplied by, of a lane's rows. It lies in shared memory: registers are short.
  struct Scale {
    float row[Tr::kRowTiles][2];

    __device__ __forceinline__ explicit Scale(uint32_t scales) {
#pragma unroll
      for (int n = 0; n < Tr::kRowTiles; ++n) {
        asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];" : "=f"(row[n][0]), "=f"(row[n][1]) : "r"(scales + n * 32));
      }
    }
    __device__ __forceinline__ float at(int n, int i) const { return row[n][i]; }
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

  // Zeros for the values of keys that no row sees.
  __device__ static void clear_values(uint32_t values, uint64_t seen) {
    sm90::RowBlock<Tr>::clear_values(values, seen);
  }

  // See RowState::soften.
  __device__ __forceinline__ void soften(bool first, const Scores& scores, const Scale& scale, uint32_t place,
                                         int barrier, float* exchange) {
    State::soften(first, scores, scale, place, barrier, [&] { return find(exchange); });
  }

  // Puts both groups' results together: `out[0]` is then this group's block of the output, dims 64 * group .., and
  // `sum` whole. Called by both. `swap`, `exchange` and `references` as in SharedLayout.
  __device__ __forceinline__ void combine(float* swap, float* exchange, float* references) {
    const Thread<Tr> me;
    const int thread = threadIdx.x % Tr::kGroupThreads, rows_of_group = Tr::kWarps * Tr::kRows;
#pragma unroll
    for (int i = 0; i < kScores; ++i) {
      swap[(me.group * kScores + i) * Tr::kGroupThreads + thread] = me.group == 0 ? out[1][i] : out[0][i];
    }
    State::share_sums({me.warp, me.lane, exchange + me.group * rows_of_group}, references + me.group * Tr::kRows);
    sync_head<Tr>();
#pragma unroll
    for (int n = 0; n < Tr::kRowTiles; ++n) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int row = 8 * n + me.lane % 4 * 2 + i, other = 1 - me.group;
        const float own_sum = State::whole_sum(exchange + me.group * rows_of_group, row);
        const float other_sum = State::whole_sum(exchange + other * rows_of_group, row);
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

 protected:
  template <int kCount>
  __device__ __forceinline__ static void pin(uint32_t (&a)[kCount][4]) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) hopper::pin(a[i]);
  }

 private:
  // The same bits whichever group calls it.
  __device__ __forceinline__ static float add_products(float a, float x, float b, float y) {
    return __fadd_rn(__fmul_rn(a, x), __fmul_rn(b, y));
  }

  __device__ __forceinline__ static GroupPlace find(float* exchange) {
    const Thread<Tr> me;
    return {me.warp, me.lane, exchange + me.group * (Tr::kWarps * Tr::kRows)};
  }
};

}  // namespace attnops::xqa_decode::sm90::fp8
