#pragma once
#include "xqa_decode/sm90/fp8/row_block.cuh"

namespace attnops::xqa_decode::sm90::fp8 {

// What sm90::RowBlock is for 16-bit pages, over e4m3: one warpgroup takes all tiles, and holds whole rows. The long
// sides of both products come from registers, as in RowBlock.
template <class Tr>
struct LoneBlock : RowBlock<Tr> {
  using Base = RowBlock<Tr>;
  using State = RowState<Tr>;
  using Scale = typename Base::Scale;
  using Scores = typename State::Scores;
  using State::sum;

  static constexpr bool kEdgesOutOfLine = false;

  // Operands in registers, as many steps of a product as find room.
  static constexpr int kSteps = min_of(Tr::kHalves ? 4 : 8, Tr::kHeadDim / 16);
  uint32_t keys[kSteps][4];    // of the product with queries
  uint32_t values[kSteps][4];  // of that with probabilities
  uint32_t scales;             // where the scales of this lane's rows are, and behind kRows floats what is left of them
  bool joined;                 // whether all of them is left for the exponent
  bool tail;                   // whether rows have the last columns

  __device__ __forceinline__ void begin(uint32_t row_scales, bool scales_join) {
    scales = row_scales + threadIdx.x % 4 * 8, joined = scales_join;
    State::clear();
  }

  // scores = keys x queries^T, in flight, or the last steps of it.
  __device__ __forceinline__ void multiply_keys(uint32_t tile, uint32_t queries, Scores& scores) {
    const typename Base::Descriptor query(hopper::operand_descriptor(queries));
    const uint32_t own = tile + key_offset(warp(), lane());
#pragma unroll
    for (int first = 0; first < Tr::kHeadDim / 16; first += kSteps) {
      if (may_lack(16 * first) && !tail) continue;
      uint32_t raw[kSteps / 2][4];  // two steps each
#pragma unroll
      for (int i = 0; i < kSteps / 2; ++i) {
        const int pair = first / 2 + i;
        hopper::load_fragment(raw[i], (own ^ (pair % 4 * 32)) + pair / 4 * hopper::kTileBytes);
      }
      if (first > 0) hopper::wgmma_wait<0>(scores);
#pragma unroll
      for (int i = 0; i < kSteps / 2; ++i) convert_keys(raw[i], keys[2 * i], keys[2 * i + 1]);
      Base::pin(keys);
      hopper::wgmma_fence();
#pragma unroll
      for (int k = 0; k < kSteps; ++k) {
        const int step = first + k;
        hopper::wgmma_rows<0>(scores, keys[k],
                              query.at(step / 4 * (Tr::kRows * 128 >> 4) + step % 4 * hopper::kStepKMajor), step > 0);
      }
      hopper::wgmma_commit();
    }
  }

  // out += values^T x probabilities, in flight, or the last blocks of it.
  __device__ __forceinline__ void multiply_values(uint32_t tile, uint32_t probs) {
    constexpr int kBlocks = kSteps / 4;  // of 64 dims
    const typename Base::Descriptor prob(hopper::plain_descriptor(probs, Tr::kTileTokens * 16));
    const uint32_t own = tile + value_offset(warp(), lane());
#pragma unroll
    for (int first = 0; first < Tr::kBlocks; first += kBlocks) {
      if (may_lack(64 * first) && !tail) continue;
      uint32_t raw[kBlocks][2][4];  // 32 keys each
#pragma unroll
      for (int b = 0; b < kBlocks; ++b) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const int column = (first + b) / 2 * hopper::kTileBytes;
          ldmatrix_x4_trans(raw[b][half], (own ^ ((first + b) % 2 * 64)) + column + half * (32 * 128));
        }
      }
      if (first > 0) wait_for_values<0>();
#pragma unroll
      for (int b = 0; b < kBlocks; ++b) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          convert_values(raw[b][half], values[4 * b + 2 * half], values[4 * b + 2 * half + 1]);
        }
      }
      Base::pin(values);
      hopper::wgmma_fence();
#pragma unroll
      for (int k = 0; k < 4; ++k) {
#pragma unroll
        for (int b = 0; b < kBlocks; ++b) {
          hopper::wgmma_rows<1>(State::out[first + b], values[4 * b + k], prob.at(k * hopper::kStepPlain), 1);
        }
      }
      hopper::wgmma_commit();
    }
  }

  template <int kPending>
  __device__ __forceinline__ void wait_for_values() {
    hopper::wgmma_wait<kPending>();
#pragma unroll
    for (int b = 0; b < Tr::kBlocks; ++b) hopper::pin(State::out[b]);
    Base::pin(values);
  }

  // Whether scores are scaled and capped before they become probabilities.
  __device__ __forceinline__ bool scales_apart() const { return !joined; }

  // The scores are complete: the operand's registers are free.
  __device__ __forceinline__ void end_scores() { Base::pin(keys); }

  template <bool kFirst>
  __device__ __forceinline__ void soften(const Scores& scores, uint32_t probs, float* exchange) {
    State::soften(kFirst, scores, Scale(scales + Tr::kRows * 4), probs + State::prob_offset(warp(), lane()), kMultiply,
                  [&] { return GroupPlace{warp(), lane(), exchange}; });
  }

  // The whole sums of the rows, in `sum`.
  __device__ __forceinline__ void add_up(float* exchange) {
    State::share_sums({warp(), lane(), exchange});
    hopper::named_barrier_sync(kMultiply, Tr::kThreads);
#pragma unroll
    for (int n = 0; n < Tr::kRowTiles; ++n) {
#pragma unroll
      for (int i = 0; i < 2; ++i) sum[n][i] = State::whole_sum(exchange, 8 * n + lane() % 4 * 2 + i);
    }
  }

 private:
  // Whether rows may lack the columns from `column` on.
  static constexpr bool may_lack(int column) { return Tr::kHeadDim > 128 && column >= Tr::kHeadDim - Tr::kTail; }

  __device__ __forceinline__ static int warp() { return threadIdx.x / 32; }
  __device__ __forceinline__ static int lane() { return threadIdx.x % 32; }
};

}  // namespace attnops::xqa_decode::sm90::fp8
