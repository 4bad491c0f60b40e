#pragma once
#include "fmha/cuda/load.cuh"
#include "fmha/cuda/own_rows.cuh"
#include "fmha/cuda/softmax.cuh"
#include "fmha/cuda/work_queue.cuh"

namespace attnops::fmha {

// Four accumulators of an array as the matrix instruction takes them.
__device__ __forceinline__ float (&quad(float* values))[4] { return *reinterpret_cast<float(*)[4]>(values); }

// A work of a CTA: all rows of its tile against all keys that they see, or a piece of them, from the first tile to the
// last.
//
// Per tile: scores, softmax, values, as FlashAttention-2 (arXiv:2307.08691, section 3.3) divides them over warps. What
// else a warp does for a tile stands between its products: copies of what comes next, and the exponentials of sixteen
// keys between the values' products of the sixteen before. Each product leaves five cycles to them. The compiler mixes
// what stands between two branches alone, so there are none.
//
// kStages: of keys and values. With two, all of the next tile comes from the last products of this one's scores on.
// With one a tile's values come while its scores are multiplied, and the next keys with its values' products: that
// needs a second barrier. kMayCut: a work may be a piece of a tile.
template <class Tr, Source kSource, int kStages, bool kMayCut>
class Attention {
 public:
  using T = typename Tr::T;
  using Layout = SharedLayout<Tr>;
  static_assert(Layout::kWork - Layout::kPlaces == Places<Tr::kKeys>::kBytes);

  __device__ __forceinline__ Attention(const Params& p, const Schedule& s, const Rows& rows, const Work& w, char* base)
      : p_(p),
        s_(s),
        rows_(rows),
        w_(w),
        base_(base),
        lane_(threadIdx.x % 32),
        warp_row_(static_cast<int>(threadIdx.x) / 32 * Tr::kWarpRows),
        shared_(smem_address(base)),
        loader_(p, s, rows, w, base) {
    q_at_ = shared_ + Layout::kQ + swizzled(warp_row_ + lane_ % 16, lane_ / 16);
    k_lane_ = swizzled(lane_ % 8 + lane_ / 16 * 8, lane_ / 8 % 2);
    v_lane_ = swizzled(lane_ % 16, lane_ / 16);
    asm volatile("" : "+r"(shared_), "+r"(q_at_), "+r"(k_lane_), "+r"(v_lane_));  // else made anew for each use
  }

  // `meanwhile` runs while the first tiles are on their way.
  template <class Meanwhile>
  __device__ __forceinline__ void run(const Meanwhile& meanwhile) {
    const int tile_begin = w_.tile_begin, tile_end = w_.tile_end;
    const bool has_keys = tile_begin < tile_end;
    int first = w_.place_of(tile_begin) * Tr::kKeys;  // key of the tile
    if (has_keys) {
      loader_.begin(tile_begin);
      loader_.bring_keys(tile_begin, first, 0, true);
      OwnRows<Tr>(p_, s_, w_, warp_row_).bring_queries(p_, base_ + Layout::kQ, rows_.queries == Copy::kPieces);
      cp_async_commit();
      loader_.bring_values(tile_begin, first, 0, true);
      cp_async_commit();
    }
    meanwhile();
    if (kMayCut && w_.num_tokens == 0) return;
    set_scales();
    set_ranges();
#pragma unroll
    for (int b = 0; b < Tr::kBlocks; ++b) {
#pragma unroll
      for (float& value : out_[b]) value = 0.f;
    }
    if (has_keys) {
      int stage = 0;
      cp_async_wait<kStages == 1 ? 1 : 0>();  // with one stage values may come later than keys
#pragma unroll 1
      for (int tile = tile_begin; tile < tile_end; ++tile) {
        first = step(tile, first, stage, tile == tile_begin, tile + 1 < tile_end);
        stage ^= kStages - 1;
        cp_async_wait<kInFlight>();
      }
    }
    finish();
  }

 private:
  // Groups of copies that a wait leaves under way. FP8 rows land where only the thread that copies them reads them, so
  // those of the next tile may come as soon as this one's are converted: keys with its scores, values with its results.
  static constexpr int kInFlight = kSource == Source::kAny ? 1 : 0;

  __device__ __forceinline__ void set_scales() {
    const float k_scale = p_.k_scale != nullptr ? p_.k_scale[w_.kv_head * p_.k_scale_stride] : 1.f;
    scale_ = p_.softmax_scale * k_scale * kLog2e;
    inner_scale_ = 0.f;
    if (p_.logit_cap > 0.f || !(scale_ > 0.f)) {  // scores are transformed before the softmax
      inner_scale_ = p_.logit_cap > 0.f ? scale_ * 2.f / p_.logit_cap : scale_ / kLog2e;
      scale_ = kLog2e;
      transformed_ = true;
    }
  }

  // Keys that some row of the warp sees, and those that all of them see.
  __device__ __forceinline__ void set_ranges() {
    const int own = warp_row_ * s_.pack_inverse >> 16, first = min_of(own, w_.num_tokens - 1);
    const int last = min_of((warp_row_ + Tr::kWarpRows - 1) * s_.pack_inverse >> 16, w_.num_tokens - 1);
    const sm90::KeyRange some = sm90::keys_of_some<false>(p_, w_, w_.first_token + first, w_.first_token + last);
    const sm90::KeyRange all = sm90::keys_of_all(p_, w_, w_.first_token + first, w_.first_token + last);
    seen_begin_ = some.begin;
    seen_end_ = own < w_.num_tokens ? some.end : 0;
    full_begin_ = transformed_ ? INT32_MAX : all.begin;
    full_end_ = all.end;
  }

  // Of the tile that begins with key `first`; what this thread has copied of it has landed, with one stage of its keys.
  // Returns the first key of the next one.
  __device__ __forceinline__ int step(int tile, int first, int stage, bool is_first, bool has_next) {
    loader_.convert_keys();
    __syncthreads();  // nobody reads the last tile any more
    const int page = kSource == Source::kInRow ? 0 : loader_.look_up(tile + 2);
    if (kStages == 2) loader_.advance(tile + 1);
    if (kStages == 1) {
      if (kSource == Source::kAny && loader_.is_raw()) {
        loader_.bring_keys(tile + 1, w_.place_of(tile + 1) * Tr::kKeys, 0, has_next);
      } else {
        loader_.bring_values(tile, first, 0, !is_first);
      }
      cp_async_commit();
    }
    const bool seen = first < seen_end_ && first + Tr::kKeys > seen_begin_;
    int next;
    if (seen) {
      uint32_t weights[2][Tr::kBlocks][4];
      multiply_keys(shared_ + Layout::kK + stage * Layout::kStageBytes);
      if (first < full_begin_ || first + Tr::kKeys > full_end_) treat(first);
      soften();
      if (kStages == 1) await_values();
      weigh(weights[0], 0, 0, kPairs);  // and copies, for which exponentials leave time
      next = bring_next(tile + 1, stage, has_next);
      if (kSource != Source::kInRow) loader_.place(tile + 2, page);
      multiply_values(shared_ + Layout::kV + stage * Layout::kStageBytes, weights, seen_end_ - first);
    } else {
      if (kStages == 1) await_values();
      next = bring_next(tile + 1, stage, has_next);
      if (kSource != Source::kInRow) loader_.place(tile + 2, page);
    }
    return next;
  }

  // With one stage: this tile's values are there then, and nobody reads its keys any more.
  __device__ __forceinline__ void await_values() {
    cp_async_wait<kInFlight>();
    loader_.convert_values();
    __syncthreads();
  }

  // With two stages both keys and values, else keys; FP8 rows: values. Returns the tile's first key.
  __device__ __forceinline__ int bring_next(int tile, int stage, bool go) {
    if (kStages == 1) loader_.advance(tile);
    const int first = w_.place_of(tile) * Tr::kKeys;
    if (kStages == 2) {
      loader_.bring_tile(tile, first, stage ^ 1, go);
    } else if (kSource == Source::kAny && loader_.is_raw()) {
      loader_.bring_values(tile, first, 0, go);
    } else {
      loader_.bring_keys(tile, first, 0, go);
    }
    cp_async_commit();
    return first;
  }

  // A lane's piece of a tile is in a row whose lowest three bits are those of the lane, and is piece 2 * step + half of
  // a chunk. Only the step is not the lane's own: `at ^ (step << 5)`.
  __device__ __forceinline__ void multiply_keys(uint32_t keys) {
    const uint32_t q_at = q_at_, k_at = keys + k_lane_;
#pragma unroll
    for (int b = 0; b < Tr::kBlocks; ++b) {
#pragma unroll
      for (float& score : scores_[b]) score = 0.f;
    }
#pragma unroll
    for (int c = 0; c < Tr::kQkChunks; ++c) {
      if (Tr::kHeadDimQk > 192 && c == 3 && c * 64 >= p_.head_dim_qk) break;
#pragma unroll
      for (int step = 0; step < 4; ++step) {
        if (c * 64 + step * 16 >= Tr::kHeadDimQk) continue;
        uint32_t q[Tr::kBlocks][4];
#pragma unroll
        for (int b = 0; b < Tr::kBlocks; ++b) {
          ldmatrix_x4(q[b], (q_at ^ (step << 5)) + c * Tr::kRows * 128 + b * 16 * 128);
        }
#pragma unroll
        for (int j = 0; j < Tr::kKeys / 16; ++j) {
          uint32_t k[4];
          ldmatrix_x4(k, (k_at ^ (step << 5)) + c * Tr::kKeys * 128 + j * 16 * 128);
#pragma unroll
          for (int b = 0; b < Tr::kBlocks; ++b) {
            mma_m16n8k16<T>(quad(scores_[b] + 8 * j), q[b], k[0], k[1]);
            mma_m16n8k16<T>(quad(scores_[b] + 8 * j + 4), q[b], k[2], k[3]);
          }
        }
      }
    }
  }

  // Caps scores of a tile whose first key is `first`, and replaces those that a row may not see.
  __device__ __forceinline__ void treat(int first) {
    if (transformed_) {
#pragma unroll
      for (int b = 0; b < Tr::kBlocks; ++b) {
#pragma unroll
        for (float& score : scores_[b]) {
          score = p_.logit_cap > 0.f ? capped(score, p_.logit_cap, inner_scale_) : score * inner_scale_;
        }
      }
    }
#pragma unroll
    for (int b = 0; b < Tr::kBlocks; ++b) {
      mask_scores(scores_[b], p_, s_, w_, warp_row_ + 16 * b + lane_ / 4, first + lane_ % 4 * 2);
    }
  }

  // Scores become exponents. No row exceeds its reference by far then.
  __device__ __forceinline__ void soften() {
    float top = 0.f;
#pragma unroll
    for (int b = 0; b < Tr::kBlocks; ++b) top = fmaxf(top, state_[b].shift(scores_[b], scale_));
    if (!__any_sync(~0u, top > RowSums::kTop || fresh_ != 0)) return;
    unsigned fresh = 0;
#pragma unroll
    for (int b = 0; b < Tr::kBlocks; ++b) fresh |= state_[b].move(scores_[b], out_[b], fresh_ >> 2 * b & 3) << 2 * b;
    fresh_ = fresh;
  }

  // Probabilities of sixteen keys, of pairs [first, last) of all rows of the lane, as the left factor of a product.
  static constexpr int kPairs = 4 * Tr::kBlocks;
  __device__ __forceinline__ void weigh(uint32_t (&weights)[Tr::kBlocks][4], int j, int first, int last) {
#pragma unroll
    for (int i = first; i < last; ++i) {
      const int b = i / 4, pair = i % 4;
      const float x = exp2_in_place(scores_[b][8 * j + 2 * pair]), y = exp2_in_place(scores_[b][8 * j + 2 * pair + 1]);
      state_[b].sum[pair % 2] += x + y;
      weights[b][pair] = pack2<T>(x, y);
    }
  }

  // `weights` has those of the first sixteen keys. Rows of the warp see keys below `end` alone.
  __device__ __forceinline__ void multiply_values(uint32_t values, uint32_t (&weights)[2][Tr::kBlocks][4], int end) {
    constexpr int kColumns = Tr::kHeadDimV / 16, kFew = min_of(kColumns, 12);  // of sixteen, as few as ever
    constexpr int kAhead = 2;  // products that wait for no fragment behind a branch
    const uint32_t v_at = values + v_lane_;
    const auto load = [v_at](uint32_t(&v)[4], int j, int n) {
      ldmatrix_x4_trans(v, (v_at ^ (n % 4 << 5)) + n / 4 * Tr::kKeys * 128 + j * 16 * 128);
    };
    uint32_t ahead[2][kAhead][4], late[kAhead][4];  // of the next keys; of the columns from kFew on
#pragma unroll
    for (int n = 0; n < kAhead; ++n) load(ahead[0][n], 0, n);
#pragma unroll
    for (int j = 0; j < Tr::kKeys / 16; ++j) {
      // Also keeps exponentials where they are: the compiler would take all of them before the first product.
      if (j > 0 && j * 16 >= end) break;
#pragma unroll
      for (int n = 0; n < kColumns; ++n) {
        if (n == kFew && p_.head_dim_v <= kFew * 16) break;
        uint32_t v[4];
        if (n < kAhead || (n >= kFew && n < kFew + kAhead)) {
#pragma unroll
          for (int i = 0; i < 4; ++i) v[i] = n < kAhead ? ahead[j % 2][n % kAhead][i] : late[n % kAhead][i];
        } else {
          load(v, j, n);
        }
#pragma unroll
        for (int b = 0; b < Tr::kBlocks; ++b) {
          mma_m16n8k16<T>(quad(out_[b] + 8 * n), weights[j % 2][b], v[0], v[1]);
          mma_m16n8k16<T>(quad(out_[b] + 8 * n + 4), weights[j % 2][b], v[2], v[3]);
        }
        if (n >= kFew) continue;
        const int to = n - (kFew - kAhead);
        if (to >= 0 && kColumns > kFew) load(late[to], j, kFew + to);
        if (j + 1 == Tr::kKeys / 16) continue;
        weigh(weights[(j + 1) % 2], j + 1, n * kPairs / kFew, (n + 1) * kPairs / kFew);
        if (to >= 0) load(ahead[(j + 1) % 2][to], j + 1, to);
      }
    }
    static_assert(kFew % kAhead == 0);
  }

  // Divides by the sums and stores rows: through the rows' own place in the queries, which nobody else reads, so that a
  // row leaves in pieces of sixteen bytes.
  __device__ __forceinline__ void finish() {
    const float v_scale = p_.v_scale != nullptr ? p_.v_scale[w_.kv_head * p_.v_scale_stride] : 1.f;
    const OwnRows<Tr> own(p_, s_, w_, warp_row_);
    const uint32_t at = shared_ + Layout::kQ + (warp_row_ + lane_ / 4) * 128 + (lane_ / 4 << 4);
    const bool is_piece = kMayCut && w_.slab >= 0;
    float lses[Tr::kBlocks][2];
    __syncwarp();
#pragma unroll
    for (int b = 0; b < Tr::kBlocks; ++b) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const float total = state_[b].total(h);
        const bool empty = total == 0.f;  // NaN is not empty: it must show
        const float lse = empty ? -INFINITY : state_[b].reference[h] * kLn2 + logf(total);
        float factor = empty ? 0.f : __fdividef(v_scale, total);
        lses[b][h] = lse;
        if (is_piece) {
          sm90::store_piece<Tr>(p_, s_, w_, warp_row_ + 16 * b + lane_ / 4 + 8 * h, lse, factor, h, lane_, out_[b]);
          continue;
        }
        if (p_.sinks != nullptr) {
          const int head = own.head_of(16 * b + lane_ / 4 + 8 * h);
          if (head >= 0 && !empty) factor = __fdividef(factor, 1.f + expf(p_.sinks[head] - lse));
        }
#pragma unroll
        for (int n = 0; n < Tr::kHeadDimV / 8; ++n) {
          const float* o = out_[b] + 4 * n + 2 * h;
          const uint32_t pair = factor == 0.f ? 0u : pack2<T>(o[0] * factor, o[1] * factor);
          const uint32_t to = (at ^ (n % 8 << 4)) + n / 8 * Tr::kRows * 128 + (16 * b + 8 * h) * 128 + lane_ % 4 * 4;
          store_shared(to, pair);
        }
      }
    }
    __syncwarp();
    if (is_piece) {
      if (lane_ == 0) sm90::count_piece(p_, 1);
    } else {
      own.store_lse(p_, lses);
      own.store(p_, base_ + Layout::kQ, rows_.out == Copy::kPieces);
    }
  }

  const Params& p_;
  const Schedule& s_;
  const Rows& rows_;
  const Work& w_;
  char* base_;
  int lane_, warp_row_;
  uint32_t shared_;                  // address of `base_`
  uint32_t q_at_, k_lane_, v_lane_;  // of this lane's pieces: in shared memory, in a tile
  Loader<Tr, kSource> loader_;
  bool transformed_ = false;
  unsigned fresh_ = (1u << 2 * Tr::kBlocks) - 1;  // bit 2 b + h: this lane's row h of block b has no reference yet
  float scale_, inner_scale_;
  int seen_begin_, seen_end_, full_begin_, full_end_;  // keys
  RowSums state_[Tr::kBlocks];
  float scores_[Tr::kBlocks][Tr::kKeys / 2];
  float out_[Tr::kBlocks][Tr::kHeadDimV / 2];
};

}  // namespace attnops::fmha
