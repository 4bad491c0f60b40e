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

  static constexpr bool kEdgesOutOfLine = true;

  typename Base::Keys keys;      // of the product with queries
  typename Base::Values values;  // of that with probabilities
  uint32_t scales;  // where the scales of this lane's rows are, and behind kRows floats what is left of them
  bool joined;      // whether all of them is left for the exponent

  __device__ __forceinline__ void begin(uint32_t row_scales, bool scales_join) {
    scales = row_scales + threadIdx.x % 4 * 8, joined = scales_join;
    State::clear();
  }

  __device__ __forceinline__ void multiply_keys(uint32_t tile, uint32_t queries, Scores& scores) {
    uint32_t raw[4][4];
    load_keys(tile + key_offset(warp(), lane()), raw);
    Base::multiply_keys(raw, queries, keys, scores);
  }

  __device__ __forceinline__ void multiply_values(uint32_t tile, uint32_t probs) {
    uint32_t raw[4][4];
    load_values(tile + value_offset(warp(), lane()), raw);
    Base::multiply_values(raw, probs, values);
  }

  template <int kPending>
  __device__ __forceinline__ void wait_for_values() {
    Base::template wait_for_values<kPending>();
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
  __device__ __forceinline__ static int warp() { return threadIdx.x / 32; }
  __device__ __forceinline__ static int lane() { return threadIdx.x % 32; }
};

}  // namespace attnops::xqa_decode::sm90::fp8
