#pragma once
#include "device/sm90/gmma.cuh"
#include "device/sm90/wgmma_fp8.cuh"
#include "fmha/sm90/convert_queries.cuh"
#include "fmha/sm90/operand_rings.cuh"
#include "fmha/sm90/softmax.cuh"
#include "fmha/sm90/store.cuh"

namespace attnops::fmha::sm90 {

// How the scores of a tile are treated before the softmax.
enum class Tile {
  kFull,         // every row sees every key
  kMasked,       // some row does not
  kTransformed,  // masked, and scores are capped, or their scale is not positive
  kCapped,       // masked, and exponents of capped scores need no reference
};

// A warpgroup that computes: 64 rows against all tiles of keys of a work.
//
// Per tile, with Shape::overlap: the scores of tile n are issued, then the values of tile n - 1; the softmax of n runs
// while those values are multiplied (FlashAttention-3, arXiv:2407.08608, section 3.2). Without: scores, softmax and
// values of one tile, which takes fewer registers. Warpgroups may take turns in issuing, so that one computes
// exponentials while the other multiplies (section 3.1).
// kFence: copies of rows arrive without a fence.
template <class Tr, bool kFence>
class Consumer : OperandRings<Tr, kFence> {
  using Base = OperandRings<Tr, kFence>;
  using Base::await_keys, Base::await_values, Base::base_, Base::group_, Base::k_operand_, Base::kVRows, Base::lane_,
      Base::pass_turn, Base::q_ring_, Base::release, Base::release_keys, Base::release_queries, Base::release_values,
      Base::s_, Base::shared_, Base::take_turn, Base::v_operand_, Base::v_ring_, Base::work_ring_;

 public:
  using T = typename Tr::T;
  using Out = typename Tr::Out;
  using Layout = SharedLayout<Tr>;
  static constexpr int kQueriesBarrier = 8;                                                // + warpgroup
  static constexpr bool kConverts = !Tr::kFp8 && !std::is_same_v<T, typename Tr::Caller>;  // queries
  static constexpr bool kHasOnly = Tr::kFewKeys > 0 && !kFence;  // a path for works of one tile
  static constexpr Shape kShape = Tr::kShape;
  // e4m3 keys in boxes: long calls are slower if that comes under the last product.
  static constexpr bool kPreparesBehind = kConverts && !kFence && kShape.overlap;
  // Exponents of capped scores, where plain calls have another kernel.
  static constexpr bool kMayBound =
      Tr::kHasPlain && !kFence && kShape.overlap && !kShape.plain && std::is_same_v<T, __nv_bfloat16>;
  // e4m3 keys have a scale as a rule, which only the device knows.
  static constexpr bool kMayTransform = !kShape.plain || Tr::kFp8 || Tr::kNarrow;
  static constexpr int kVStep = 2 * Tr::kVGroupBytes >> 4;               // sixteen keys
  static constexpr int kProbabilities = Tr::kKeys * int{sizeof(T)} / 8;  // registers

  __device__ __forceinline__ Consumer(const Params& p, const Schedule& s, char* base)
      : Base(s, base), p_(p), warp_(threadIdx.x / 32 % 4) {}

  // Until no work is left. Returns how many pieces the plan has.
  __device__ __forceinline__ int run() {
    int pieces = 0;
    if (kShape.turns && group_ == Tr::kWarpgroups - 1) pass_turn();  // the first turn is group 0's
    for (;;) {
      hopper::mbarrier_wait(shared_ + Layout::kQFull + 8 * q_ring_.stage, q_ring_.phase);
      const Work& w = *reinterpret_cast<const Work*>(base_ + Layout::kWorks + work_ring_.stage * Layout::kWorkBytes);
      if (w.num_tokens < 0) {
        pieces = w.slab;
        break;
      }
      // A vote: what the compiler takes for a branch of single threads keeps descriptors out of uniform registers.
      if (__any_sync(0xffffffffu, 64 * group_ < w.num_tokens * s_.pack)) {
        if constexpr (kHasOnly) {
          const int only = s_.plain != 0 ? keys_of_only_tile<Tr::kKeys>(w) : 0;
          if (!__any_sync(0xffffffffu, only > 0)) {
            attend(w);
          } else {
            if (__any_sync(0xffffffffu, only <= Tr::kFewKeys)) {
              attend_only<Tr::kFewKeys>(w);
            } else {
              attend_only<Tr::kKeys>(w);
            }
          }
        } else {
          attend(w);
        }
        if constexpr (!kPreparesBehind) finish(w);
      } else {
        release_queries(true);
        this->pass_by(w);
      }
      finish_piece(w);
      hopper::mbarrier_arrive(shared_ + Layout::kWorkDone + 8 * work_ring_.stage);
      work_ring_.advance();
      q_ring_.advance();
    }
    if (kShape.turns && group_ == 0) take_turn();
    return pieces;
  }

 private:
  __device__ __forceinline__ void attend(const Work& w) {
    const int first_row = 64 * group_;
    rows_.template start<kShape.plain>(p_, s_, w, first_row + 16 * warp_ + lane_ / 4);
    column_ = lane_ % 4 * 2;
    const float k_scale = p_.k_scale != nullptr ? p_.k_scale[w.kv_head * p_.k_scale_stride] : 1.f;
    scale_ = p_.softmax_scale * k_scale * kLog2E;
    transformed_ = kMayTransform && ((!kShape.plain && p_.logit_cap > 0.f) || !(scale_ > 0.f));
    bounded_ = false;
    if (transformed_) {
      inner_scale_ = scale_ / kLog2E;
      scale_ = kLog2E;
      if (!kShape.plain && p_.logit_cap > 0.f) {
        inner_scale_ /= p_.logit_cap;
        scale_ *= p_.logit_cap;
        if constexpr (kMayBound) {  // other bits than those of gathered rows
          bounded_ = scale_ <= kMostExponent && p_.pieces != nullptr;
          if (bounded_) {
            rows_.reference[0] = rows_.reference[1] = 0.f;
            capped_.start(inner_scale_, scale_);
          }
        }
      }
    }
    const uint32_t queries = shared_ + Layout::kQ + q_ring_.stage * Tr::kQBytes + first_row * 128;
    q_operand_ = hopper::chunk_operand<Tr::kRows>(queries);
    if constexpr (kConverts) {
      convert_queries<Tr>(queries, 16 * warp_ + lane_ / 4, lane_, row_factor_);
#pragma unroll
      for (int h = 0; h < 2; ++h) row_scale_[h] = transformed_ ? scale_ : scale_ * row_factor_[h];
      hopper::fence_async_proxy();  // the matrix units read through another proxy
      hopper::named_barrier_sync(kQueriesBarrier + group_, 128);
    }

    int tile = w.tile_begin;
    const int tile_end = w.tile_end;
    if (tile < tile_end) {
      int full_begin, full_end;
      full_tiles(w, first_row, full_begin, full_end);
      bool started = false;
      if constexpr (kShape.overlap) first_scores(w, tile++, tile_end);
      if (kMayBound && __any_sync(0xffffffffu, bounded_)) {
#pragma unroll 1
        for (; tile < tile_end; ++tile) {
          step<Tile::kCapped>(w, tile, tile_end, tile < full_begin || tile >= full_end, started);
        }
      } else if (kMayTransform && transformed_) {
        for (; tile < tile_end; ++tile) {
          step<Tile::kTransformed>(w, tile, tile_end, tile < full_begin || tile >= full_end, started);
        }
      } else {
#pragma unroll 1
        for (int part = 0; part < 2; ++part) {
          const int masked_end = part == 0 ? min_of(max_of(full_begin, tile), tile_end) : tile_end;
#pragma unroll 1
          for (; tile < masked_end; ++tile) step<Tile::kMasked>(w, tile, tile_end, true, started);
#pragma unroll 1
          for (; tile < full_end; ++tile) step<Tile::kFull>(w, tile, tile_end, false, started);
        }
      }
      if constexpr (kShape.overlap) {
        await_values();
        hopper::wgmma_fence();
        if constexpr (kPreparesBehind) {
          multiply_values(started);
        } else {
          issue_values(started);
          prepare(w, true);
          hopper::wgmma_wait<0>(out_);
          release_values();
        }
      } else {
        prepare(w, true);
      }
    } else if constexpr (!kPreparesBehind) {
      release(shared_ + Layout::kQEmpty + 8 * q_ring_.stage);
      prepare(w, false);
    }
    if constexpr (kPreparesBehind) {
      if (tile_end == w.tile_begin) release(shared_ + Layout::kQEmpty + 8 * q_ring_.stage);
      divide_and_store(w, tile_end > w.tile_begin);
    }
  }

  // A work of one tile, of which `kColumns` keys are multiplied, in a plain call. Nothing waits for what its rows may
  // see but the masks: that is found out under the scores' product.
  template <int kColumns>
  __device__ __forceinline__ void attend_only(const Work& w) {
    float scores[kColumns / 2], shrink[2];
    uint32_t probabilities[kColumns / 4];
    const int first_row = 64 * group_;
    q_operand_ = hopper::chunk_operand<Tr::kRows>(shared_ + Layout::kQ + q_ring_.stage * Tr::kQBytes + first_row * 128);
    await_keys();
    take_turn();
    hopper::wgmma_fence();
    issue_scores(scores);
    pass_turn();
    rows_.template start<true>(p_, s_, w, first_row + 16 * warp_ + lane_ / 4);
    const int column = w.tile_begin * Tr::kKeys + lane_ % 4 * 2;
    const float scale = p_.softmax_scale * kLog2E;
    hopper::wgmma_wait<0>(scores);
    release_keys();
    release_queries(true);
    rows_.mask_ranges(scores, column);
    rows_.template to_exponents<true>(scores, scale, shrink);
    rows_.exponentiate(scores);
#pragma unroll
    for (int i = 0; i < kColumns / 4; ++i) {
      probabilities[i] = hopper::pack_pair<T>(scores[2 * i], scores[2 * i + 1]);
    }
    await_values();
    hopper::wgmma_fence();
#pragma unroll
    for (int step = 0; step < kColumns / 16; ++step) {
      hopper::gmma<T, hopper::kRowsAreK>(out_, probabilities + 4 * step,
                                         hopper::chunk_descriptor<Tr::kVGroupBytes>(v_operand_ + step * kVStep),
                                         step != 0);
    }
    hopper::wgmma_commit();
    prepare(w, true);
    hopper::wgmma_wait<0>(out_);
    release_values();
  }

  // Tiles that all rows of the warpgroup see whole: [begin, end).
  __device__ __forceinline__ void full_tiles(const Work& w, int first_row, int& begin, int& end) const {
    const int first = min_of(first_row * s_.pack_inverse >> 16, w.num_tokens - 1);
    const int last = min_of((first_row + 63) * s_.pack_inverse >> 16, w.num_tokens - 1);
    const KeyRange keys = keys_of_all(p_, w, w.first_token + first, w.first_token + last);
    begin = ceil_div(keys.begin, Tr::kKeys);
    end = min_of(keys.end / Tr::kKeys, w.tile_end);  // before any gap
  }

  template <int kCount>
  __device__ __forceinline__ void issue_scores(float (&scores)[kCount]) {
#pragma unroll
    for (int step = 0; step < Tr::kHeadDimQk * int{sizeof(T)} / 32; ++step) {
      const int chunk = step / 4, inside = step % 4 * hopper::kStepKMajor;
      hopper::gmma<T, hopper::kRowsAreN>(
          scores, hopper::chunk_descriptor(q_operand_ + (chunk * Tr::kRows * 128 >> 4) + inside),
          hopper::chunk_descriptor<Tr::kKGroupBytes>(k_operand_ + (chunk * Tr::kChunkRows * 128 >> 4) + inside),
          step != 0);
    }
    hopper::wgmma_commit();
  }

  __device__ __forceinline__ void issue_values(bool accumulate) {
#pragma unroll
    for (int step = 0; step < Tr::kKeys * int{sizeof(T)} / 32; ++step) {
      if constexpr (Tr::kFp8) {
        const int inside = step / 4 * (kVRows * 128 >> 4) + step % 4 * hopper::kStepKMajor;
        hopper::gmma<T, hopper::kRowsAreN>(out_, probabilities_ + 4 * step,
                                           hopper::chunk_descriptor(v_operand_ + inside), accumulate || step != 0);
      } else {
        hopper::gmma<T, hopper::kRowsAreK>(out_, probabilities_ + 4 * step,
                                           hopper::chunk_descriptor<Tr::kVGroupBytes>(v_operand_ + step * kVStep),
                                           accumulate || step != 0);
      }
    }
    hopper::wgmma_commit();
  }

  // The assembler would move the wait for the values ahead of the exponentials that are to hide it. It does not move it
  // across a loop: here one on a barrier whose phase is over. At head dim 256 it would move exponentials across, but
  // for an address that depends on their sums, which are never negative.
  __device__ __forceinline__ void keep_before_wait() {
    hopper::pin(scores_);
    uint32_t full = shared_ + Layout::kVFull + 8 * v_ring_.stage;
    if constexpr (Tr::kHeadDimV > 192 && !Tr::kFp8) full += rows_.sum[0] + rows_.sum[1] < 0.f ? 8 : 0;
    hopper::mbarrier_wait(full, v_ring_.phase);
  }

  template <Tile kTile>
  __device__ __forceinline__ void treat(const Work& w, int tile, bool masked) {
    if constexpr (kTile == Tile::kTransformed) {
      if constexpr (kConverts) {
#pragma unroll
        for (int i = 0; i < Tr::kKeys / 2; ++i) scores_[i] *= row_factor_[i / 2 % 2];
      }
      if (!kShape.plain && p_.logit_cap > 0.f) {
        cap_scores(scores_, inner_scale_);
      } else {
#pragma unroll
        for (float& score : scores_) score *= inner_scale_;
      }
    }
    if constexpr (kTile != Tile::kFull && kShape.plain) {
      rows_.mask_ranges(scores_, tile * Tr::kKeys + column_);
    } else if constexpr (kTile != Tile::kFull) {
      if (kTile == Tile::kMasked || masked) rows_.mask(scores_, p_, w, w.place_of(tile) * Tr::kKeys + column_);
    }
  }

  __device__ __forceinline__ bool to_exponents(float (&shrink)[2]) {
    if constexpr (kConverts) {
      return rows_.template to_exponents<kShape.largest_first>(scores_, row_scale_, shrink);
    } else {
      return rows_.template to_exponents<kShape.largest_first>(scores_, scale_, shrink);
    }
  }

  // Scores of a tile become exponents. Returns whether references have moved.
  template <Tile kTile>
  __device__ __forceinline__ bool treat_to_exponents(const Work& w, int tile, bool masked, float (&shrink)[2]) {
    if constexpr (kTile == Tile::kCapped) {
      capped_.to_exponents(scores_, inner_scale_, scale_);
      if (masked) rows_.mask(scores_, p_, w, w.place_of(tile) * Tr::kKeys + column_);
      return false;
    } else {
      treat<kTile>(w, tile, masked);
      return to_exponents(shrink);
    }
  }

  // e4m3: a lane's four places of a row take its own keys, 2 (lane % 4) + {0, 1} and + 8. Values lie in that order.
  __device__ __forceinline__ void pack() {
#pragma unroll
    for (int i = 0; i < kProbabilities; ++i) {
      if constexpr (Tr::kFp8) {
        const float* s = scores_ + i / 2 * 8 + i % 2 * 2;
        probabilities_[i] = hopper::pack_e4m3(s[0], s[1]) | hopper::pack_e4m3(s[4], s[5]) << 16;
      } else {
        probabilities_[i] = hopper::pack_pair<T>(scores_[2 * i], scores_[2 * i + 1]);
      }
    }
  }

  __device__ __forceinline__ void shrink_out(const float (&shrink)[2]) {
#pragma unroll
    for (int i = 0; i < Tr::kHeadDimV / 2; ++i) out_[i] *= shrink[i / 2 % 2];
  }

  // Where a work's end is held in a register, which the other kernels have none for.
  static __device__ __forceinline__ bool is_last(const Work& w, int tile, int tile_end) {
    return tile + 1 == (kShape.plain ? tile_end : w.tile_end);
  }

  __device__ __forceinline__ void first_scores(const Work& w, int tile, int tile_end) {
    await_keys();
    take_turn();
    hopper::wgmma_fence();
    issue_scores(scores_);
    pass_turn();
    hopper::wgmma_wait<0>(scores_);
    release_keys();
    release_queries(is_last(w, tile, tile_end));
    float shrink[2];
    if (kMayBound && bounded_) {
      treat_to_exponents<Tile::kCapped>(w, tile, true, shrink);
    } else {
      if (kMayTransform && transformed_) {
        treat<Tile::kTransformed>(w, tile, true);
      } else {
        treat<Tile::kMasked>(w, tile, true);
      }
      to_exponents(shrink);
    }
    rows_.exponentiate(scores_);
    pack();
  }

  template <Tile kTile>
  __device__ __forceinline__ void step(const Work& w, int tile, int tile_end, bool masked, bool& started) {
    float shrink[2];
    await_keys();
    take_turn();
    hopper::wgmma_fence();
    issue_scores(scores_);
    if constexpr (kShape.overlap) {
      await_values();
      hopper::wgmma_fence();  // the assembler packs probabilities behind the first fence
      issue_values(started);
      started = true;
      pass_turn();
      hopper::wgmma_wait<1>(scores_);
      release_keys();
      release_queries(is_last(w, tile, tile_end));
      const bool moved = treat_to_exponents<kTile>(w, tile, masked, shrink);
      rows_.exponentiate(scores_);
      keep_before_wait();
      hopper::wgmma_wait<0>(out_);
      release_values();
      if (moved) shrink_out(shrink);
      pack();
    } else {
      pass_turn();
      hopper::wgmma_wait<0>(scores_);
      release_keys();
      release_queries(is_last(w, tile, tile_end));
      const bool moved = treat_to_exponents<kTile>(w, tile, masked, shrink);
      if (moved) shrink_out(shrink);
      rows_.exponentiate(scores_);
      pack();
      await_values();
      hopper::wgmma_fence();
      multiply_values(started);
      started = true;
    }
  }

  __device__ __forceinline__ void multiply_values(bool started) {
    issue_values(started);
    hopper::wgmma_wait<0>(out_);
    release_values();
  }

  // Divides by the sums and stores rows.
  __device__ __forceinline__ void divide_and_store(const Work& w, bool any_tile) {
    const float v_scale = p_.v_scale != nullptr ? p_.v_scale[w.kv_head * p_.v_scale_stride] : 1.f;
    const int own_row = 64 * group_ + 16 * warp_ + lane_ / 4;
    const bool is_piece = __any_sync(0xffffffffu, w.slab >= 0);
    float factor[2];
    Out* rows[2] = {};
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int row = own_row + 8 * h;
      const RowPlace at = place_of_row(s_, w, row);
      const float total = any_tile ? rows_.total(h) : 0.f;
      const bool empty = total == 0.f;  // NaN is not empty: it must show
      const float lse = empty ? -INFINITY : rows_.reference[h] / kLog2E + logf(total);
      factor[h] = empty ? 0.f : v_scale / total;
      if (!at.exists) continue;
      if (is_piece) {
        store_piece<Tr>(p_, s_, w, row, lse, factor[h], h, lane_, out_);
        continue;
      }
      if (p_.sinks != nullptr && !empty) factor[h] /= 1.f + expf(p_.sinks[at.head] - lse);
      const int64_t token = static_cast<int64_t>(w.first_q_token) + w.first_token + at.token;
      if (p_.lse != nullptr && lane_ % 4 == 0) p_.lse[token * p_.num_q_heads + at.head] = lse;
      rows[h] = static_cast<Out*>(p_.out) + token * p_.out_stride_token + at.head * p_.out_stride_head;
    }
    if (!is_piece) store_rows<Tr>(p_, rows, factor, lane_, out_);
  }

  // By what a lane's two rows are multiplied, and where they go: all that can be known before values are multiplied.
  __device__ __forceinline__ void prepare(const Work& w, bool any_tile) {
    const float v_scale = p_.v_scale != nullptr ? p_.v_scale[w.kv_head * p_.v_scale_stride] : 1.f;
    const bool is_piece = __any_sync(0xffffffffu, w.slab >= 0);
    const bool wants_lse = is_piece || p_.lse != nullptr || p_.sinks != nullptr;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const RowPlace at = place_of_row(s_, w, 64 * group_ + 16 * warp_ + lane_ / 4 + 8 * h);
      const float total = any_tile ? rows_.total(h) : 0.f;
      const bool empty = total == 0.f;  // NaN is not empty: it must show
      lse_[h] = -INFINITY;
      if (wants_lse && !empty) lse_[h] = rows_.reference[h] / kLog2E + logf(total);
      factor_[h] = empty ? 0.f : v_scale / total;
      to_[h] = nullptr;
      if (is_piece || !at.exists) continue;
      if (p_.sinks != nullptr && !empty) {
        factor_[h] /= 1.f + expf(p_.sinks[at.head] - lse_[h]);
      }
      const int64_t token = static_cast<int64_t>(w.first_q_token) + w.first_token + at.token;
      if (p_.lse != nullptr && lane_ % 4 == 0) p_.lse[token * p_.num_q_heads + at.head] = lse_[h];
      to_[h] = static_cast<Out*>(p_.out) + token * p_.out_stride_token + at.head * p_.out_stride_head;
    }
  }

  // Stores rows as they were prepared.
  __device__ __forceinline__ void finish(const Work& w) const {
    if (!__any_sync(0xffffffffu, w.slab >= 0)) return store_rows<Tr>(p_, to_, factor_, lane_, out_);
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int row = 64 * group_ + 16 * warp_ + lane_ / 4 + 8 * h;
      if (place_of_row(s_, w, row).exists) store_piece<Tr>(p_, s_, w, row, lse_[h], factor_[h], h, lane_, out_);
    }
  }

  // This warp's rows of a piece are stored.
  __device__ __forceinline__ void finish_piece(const Work& w) const {
    if (__any_sync(0xffffffffu, w.slab >= 0)) {
      __syncwarp();
      if (lane_ == 0) count_piece(p_, 1);
    }
  }

  const Params& p_;
  int warp_, column_ = 0;
  bool transformed_ = false, bounded_ = false;
  Capped capped_;
  float scale_ = 0.f, inner_scale_ = 0.f;
  float row_scale_[2] = {}, row_factor_[2] = {};  // kConverts: scale_, and what a row's queries were divided by
  uint32_t q_operand_ = 0;
  RowPair<Tr::kFp8> rows_;
  float factor_[2], lse_[2];  // of what is stored
  Out* to_[2];
  float scores_[Tr::kKeys / 2];
  float out_[Tr::kHeadDimV / 2];
  uint32_t probabilities_[kProbabilities];
};

}  // namespace attnops::fmha::sm90
