#pragma once
#include "device/sm90/wgmma_few.cuh"
#include "device/sm90/wgmma_fp8.cuh"
#include "mla_decode/sm90/few_rows/softmax.cuh"
#include "mla_decode/sm90/fp8_products/load.cuh"
#include "mla_decode/sm90/fp8_products/softmax.cuh"

namespace attnops::mla_decode::sm90::fp8_products {

using attnops::sm90::fence_async_proxy;
using attnops::sm90::half_row_descriptor;
using attnops::sm90::uniform_operand;
using attnops::sm90::wgmma_commit;
using attnops::sm90::wgmma_e4m3;
using attnops::sm90::wgmma_fence;
using attnops::sm90::wgmma_wait;

// The warpgroup with the scores: q k^T of every tile, and its probabilities, which it gives to the others.
template <Options kOptions>
class ScoreConsumer {
  using L = Layout;
  using Scores = float[32];
  static constexpr int kLatentSteps = kHeadDimV / 32;  // of 32 columns
  static constexpr int kFirstHalf = kQueryStageSteps;  // of these, in the first half of q
  static constexpr int kGiveAt = 4;

 public:
  __device__ ScoreConsumer(const Params& p, const Modes& modes, uint8_t* base, uint32_t shared)
      : p_(p),
        modes_(modes),
        base_(base),
        shared_(shared),
        lane_(threadIdx.x % 32),
        warp_(threadIdx.x % kGroupThreads / 32),
        raw_scale_(fabsf(p.softmax_scale * (p.kv_scale ? *p.kv_scale : 1.f) * kLog2e)) {}

  __device__ void run() {
    PieceWalkFor<kOptions> walk(*reinterpret_cast<const SplitKvEntry*>(base_ + L::kEntry));
    Piece piece;
    while (walk.next(p_, piece)) {
      rows_.template begin<kOptions>(p_, piece);
      mbarrier_wait(shared_ + L::barrier_queries(0), parity_);
      for (int half = 0; half < kQueryStages; ++half) ring_.advance();
      begin_piece(piece);
#pragma unroll 1
      for (int t = 0; t < piece.num_tiles; ++t) {
        Scores s;
        multiply_queries(t, t > 0, s);
        store_tile(piece, (piece.first_tile + t) * kPlanTileTokens, s);
        ring_.advance();
        ++given_;
      }
      if (piece.num_tiles == 0) wait_second_half();
      parity_ ^= 1;
      give(piece.num_tiles > 0);
      publish();
      attnops::sm90::mbarrier_arrive(shared_ + L::kTotalsThere);
    }
  }

 private:
  __device__ void begin_piece(const Piece& piece) {
    first_box_ = ceil_div(piece.keys.begin, kPlanTileTokens) - piece.first_tile;
    last_box_ = modes_.use_boxes ? boxes_end<kOptions>(p_, piece) / kPlanTileTokens - piece.first_tile : 0;
    seen_by_all_ = few_rows::keys_of_all_rows(p_, piece).end;
    const float* query = reinterpret_cast<const float*>(base_ + L::kQueryScale);
#pragma unroll
    for (int h = 0; h < kRowsPerThread; ++h) {
      const float scale = query[row(h)] * raw_scale_;
      rows_.maximum[h] = kUnset;
      is_bad_[h] = isnan(scale);  // of a query that is not finite: shown where it sees a key, and only there
      scale_.row[h] = scale == 0.f || is_bad_[h] ? 1e-30f : scale;  // -infinity times it must stay what it is
    }
  }

  __device__ int row(int h) const { return warp_ * 16 + lane_ / 4 + 8 * h; }

  // s = q k^T of tile t. On the way, late, the probabilities of the tile before are given: their products then lie
  // under this tile's softmax, in which the matrix units would be idle, and not beside its scores.
  __device__ void multiply_queries(int t, bool has_before, Scores& s) const {
    mbarrier_wait(shared_ + L::barrier_full(ring_.stage), ring_.phase);
    if (t < first_box_ || t >= last_box_) fence_async_proxy();  // rows arrive by ordinary writes
    constexpr int kStep = attnops::sm90::kStepKMajor, kTile = kTileBytes >> 4;
    const uint32_t q = uniform_operand(shared_ + L::kQ);
    const uint32_t k = uniform_operand(shared_ + L::kKv + ring_.stage * kStageBytes);
    wgmma_fence();
#pragma unroll
    for (int i = 0; i < kLatentSteps; ++i) {
      if (i == kGiveAt) give(has_before);
      if (i == kFirstHalf && !has_before) wait_second_half();
      const int at = i / 4 * kTile + i % 4 * kStep;
      wgmma_e4m3(s, attnops::sm90::group_descriptor<1024>(q + at), attnops::sm90::group_descriptor<1024>(k + at),
                 i > 0);
    }
#pragma unroll
    for (int step = 0; step < 2; ++step) {
      const int at = (kRope >> 4) + step * kStep;
      wgmma_e4m3(s, half_row_descriptor(q + at), half_row_descriptor(k + at), 1);
    }
    wgmma_commit();
    wgmma_wait<0>(s);
  }

  // Of the piece's queries.
  __device__ void wait_second_half() const { mbarrier_wait(shared_ + L::barrier_queries(1), parity_); }

  // To the groups with values: the last probabilities that were stored.
  __device__ void give(bool condition) const {
    fence_async_proxy();
    attnops::sm90::mbarrier_arrive_if(shared_ + L::barrier_given((given_ - 1) % L::kBuffers), condition);
  }

  // From scores to probabilities.
  __device__ void store_tile(const Piece& piece, int first_key, Scores& s) {
    const int buffer = given_ % L::kBuffers;
    const ScoreScale scale = prepare_scores<kOptions>(p_, piece, rows_, scale_, seen_by_all_, first_key, s);
    float factor[kRowsPerThread], sums[kRowsPerThread];
    Words words;
    exponentiate(rows_, scale, s, words, sums);
    const bool moves = __any_sync(0xffffffffu, !(fmaxf(sums[0], sums[1]) <= kMostSum));
    if (moves) {
      raise_references(rows_, scale, s, factor);
      exponentiate(rows_, scale, s, words, sums);
    }
#pragma unroll
    for (int h = 0; h < kRowsPerThread; ++h) rows_.sum[h] += sums[h];
    mbarrier_wait(shared_ + L::barrier_taken(buffer), (given_ / L::kBuffers & 1) ^ 1);
    if (moves) publish_factors(buffer, factor);
    if (lane_ == 0) base_[L::kRescales + 4 * buffer + warp_] = moves;
    fp8_products::store_probabilities(words, shared_ + L::kP + buffer * L::kProbabilityBytes);
  }

  // What the warp's rows of the output must be multiplied by.
  __device__ void publish_factors(int buffer, const float (&factor)[kRowsPerThread]) const {
    if (lane_ % 4 != 0) return;
    float* factors = reinterpret_cast<float*>(base_ + L::kFactors) + buffer * 64;
#pragma unroll
    for (int h = 0; h < kRowsPerThread; ++h) factors[row(h)] = factor[h];
  }

  // Sums and references of a piece: of the next one elsewhere, for these are read when that has begun.
  __device__ void publish() const {
    const int parity = *reinterpret_cast<const volatile int*>(base_ + L::kParity);
    float* totals = reinterpret_cast<float*>(base_ + L::totals(parity));
#pragma unroll
    for (int h = 0; h < kRowsPerThread; ++h) {
      const float sum = quad_sum(rows_.sum[h]);
      // Here, and not in each tile's scores: a sum is above zero where the row has seen a key.
      if (lane_ % 4 == 0) totals[row(h)] = is_bad_[h] && sum != 0.f ? NAN : sum;
      if (lane_ % 4 == 0) totals[64 + row(h)] = rows_.maximum[h];
    }
  }

  const Params& p_;
  const Modes& modes_;
  uint8_t* const base_;
  const uint32_t shared_;
  const int lane_, warp_;
  const float raw_scale_;
  RowState rows_;
  ScoreScale scale_;
  bool is_bad_[kRowsPerThread];
  int seen_by_all_;
  int first_box_, last_box_;  // of the piece: tiles that come by the copy engine
  Ring ring_;
  int given_ = 0;        // tiles so far
  uint32_t parity_ = 0;  // of the piece
};

}  // namespace attnops::mla_decode::sm90::fp8_products
