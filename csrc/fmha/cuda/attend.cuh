#pragma once
#include "fmha/cuda/load.cuh"
#include "fmha/cuda/softmax.cuh"
#include "fmha/cuda/work_queue.cuh"

namespace attnops::fmha {

// Four accumulators of an array as the matrix instruction takes them.
__device__ __forceinline__ float (&quad(float* values))[4] { return *reinterpret_cast<float(*)[4]>(values); }

// A work of a CTA: all rows of its tile against all keys that they see, or a piece of them, from the first tile to the
// last.
//
// Per tile: scores, softmax, values, as FlashAttention-2 (arXiv:2307.08691, section 3.3) divides them over warps. While
// scores are multiplied, the tile's values arrive, and the keys of the next tile where two stages have room.
//
// kInRow: of keys and values whose rows follow each other in a tile. kMayCut: a work may be a piece of a tile.
template <class Tr, bool kInRow, bool kMayCut>
class Attention {
 public:
  using T = typename Tr::T;
  using Layout = SharedLayout<Tr>;
  static_assert(Layout::kWork - Layout::kPlaces == Places<Tr::kKeys, kInRow>::kBytes);

  __device__ __forceinline__ Attention(const Params& p, const Schedule& s, const Rows& rows, const Work& w, char* base)
      : p_(p),
        s_(s),
        rows_(rows),
        w_(w),
        base_(base),
        lane_(threadIdx.x % 32),
        warp_row_(static_cast<int>(threadIdx.x) / 32 * Tr::kWarpRows),
        loader_(p, s, rows, w, base) {}

  // `meanwhile` runs while the first tiles are on their way.
  template <class Meanwhile>
  __device__ __forceinline__ void run(const Meanwhile& meanwhile) {
    const int tile_begin = w_.tile_begin, tile_end = w_.tile_end;
    const bool has_keys = tile_begin < tile_end;
    if (has_keys) {
      loader_.bring_queries();
      loader_.place(tile_begin, loader_.look_up(tile_begin));
      loader_.place(tile_begin + 1, loader_.look_up(tile_begin + 1));
      __syncthreads();
      loader_.bring_keys(tile_begin, 0);
      cp_async_commit();
      loader_.bring_values(tile_begin);
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
#pragma unroll 1
      for (int tile = tile_begin; tile < tile_end; ++tile) {
        step(tile, stage);
        stage ^= rows_.k_stages - 1;
      }
      cp_async_wait<0>();  // keys behind the last tile: zeros, but on their way
    }
    finish();
  }

 private:
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

  // Tiles that some row of the warp sees, and those that all of them see whole.
  __device__ __forceinline__ void set_ranges() {
    const int own = warp_row_ * s_.pack_inverse >> 16, first = min_of(own, w_.num_tokens - 1);
    const int last = min_of((warp_row_ + Tr::kWarpRows - 1) * s_.pack_inverse >> 16, w_.num_tokens - 1);
    const sm90::KeyRange some = sm90::keys_of_some(p_, w_, w_.first_token + first, w_.first_token + last);
    const sm90::KeyRange all = sm90::keys_of_all(p_, w_, w_.first_token + first, w_.first_token + last);
    seen_begin_ = w_.tile_of(some.begin / Tr::kKeys);
    seen_end_ = own < w_.num_tokens ? w_.tile_of(ceil_div(some.end, Tr::kKeys)) : 0;
    full_begin_ = transformed_ ? INT32_MAX : ceil_div(all.begin, Tr::kKeys);
    full_end_ = all.end / Tr::kKeys;
  }

  __device__ __forceinline__ void step(int tile, int stage) {
    const bool is_first = tile == w_.tile_begin;
    if (is_first) {
      cp_async_wait<1>();  // its values may come later
    } else {
      cp_async_wait<0>();
    }
    loader_.convert_keys(stage);
    __syncthreads();  // this tile's keys are there; nobody reads the last tile's keys and values any more
    if (!is_first) {
      loader_.bring_values(tile);
      cp_async_commit();
    }
    if (rows_.k_stages == 2) {
      loader_.bring_keys(tile + 1, stage ^ 1);
      cp_async_commit();
    }
    const int page = loader_.look_up(tile + 2);
    const bool seen = tile >= seen_begin_ && tile < seen_end_;
    if (seen) {
      multiply_keys(base_ + Layout::kK + stage * Tr::kKBytes);
      if (tile < full_begin_ || tile >= full_end_) treat(tile);
      soften();
    }
    if (rows_.k_stages == 2) {
      cp_async_wait<1>();
    } else {
      cp_async_wait<0>();
    }
    loader_.convert_values();
    __syncthreads();  // this tile's values are there; nobody reads its keys and its places any more
    loader_.place(tile + 2, page);
    if (rows_.k_stages == 1) {
      loader_.bring_keys(tile + 1, stage);
      cp_async_commit();
    }
    if (seen) multiply_values();
  }

  // Byte of a lane's piece within a tile: row `row` of the lane, whose lowest three bits are those of the lane, and
  // piece 2 * step + half of a chunk. Only the step is not the lane's own: `at ^ (step << 5)`.
  __device__ __forceinline__ static uint32_t piece(const char* tile, int row, int half) {
    return smem_address(tile) + swizzled(row, half);
  }

  __device__ __forceinline__ void multiply_keys(const char* keys) {
    const uint32_t q_at = piece(base_ + Layout::kQ, warp_row_ + lane_ % 16, lane_ / 16);
    const uint32_t k_at = piece(keys, lane_ % 8 + lane_ / 16 * 8, lane_ / 8 % 2);
#pragma unroll
    for (int b = 0; b < Tr::kBlocks; ++b) {
#pragma unroll
      for (float& score : scores_[b]) score = 0.f;
    }
#pragma unroll
    for (int c = 0; c < Tr::kQkChunks; ++c) {
      if (Tr::kHeadDimQk > 192 && c * 64 >= p_.head_dim_qk) break;
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

  // Caps scores, and replaces those that a row may not see.
  __device__ __forceinline__ void treat(int tile) {
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
      mask_scores(scores_[b], p_, s_, w_, warp_row_ + 16 * b + lane_ / 4,
                  w_.place_of(tile) * Tr::kKeys + lane_ % 4 * 2);
    }
  }

  // Scores become probabilities, packed.
  __device__ __forceinline__ void soften() {
#pragma unroll
    for (int b = 0; b < Tr::kBlocks; ++b) {
      float shrink[2];
      if (state_[b].probabilities(scores_[b], scale_, shrink)) {
#pragma unroll
        for (int i = 0; i < Tr::kHeadDimV / 2; ++i) out_[b][i] *= shrink[i / 2 % 2];
      }
#pragma unroll
      for (int i = 0; i < Tr::kKeys / 4; ++i) {
        probabilities_[b][i] = pack2<T>(scores_[b][2 * i], scores_[b][2 * i + 1]);
      }
    }
  }

  __device__ __forceinline__ void multiply_values() {
    const uint32_t v_at = piece(base_ + Layout::kV, lane_ % 16, lane_ / 16);
#pragma unroll
    for (int j = 0; j < Tr::kKeys / 16; ++j) {
#pragma unroll
      for (int n = 0; n < Tr::kHeadDimV / 16; ++n) {
        if (Tr::kHeadDimV > 192 && n * 16 >= p_.head_dim_v) break;
        uint32_t v[4];
        ldmatrix_x4_trans(v, (v_at ^ (n % 4 << 5)) + n / 4 * Tr::kKeys * 128 + j * 16 * 128);
#pragma unroll
        for (int b = 0; b < Tr::kBlocks; ++b) {
          const uint32_t(&weights)[4] = *reinterpret_cast<const uint32_t(*)[4]>(probabilities_[b] + 4 * j);
          mma_m16n8k16<T>(quad(out_[b] + 8 * n), weights, v[0], v[1]);
          mma_m16n8k16<T>(quad(out_[b] + 8 * n + 4), weights, v[2], v[3]);
        }
      }
    }
  }

  // Divides by the sums and stores rows: through the rows' own place in the queries, which nobody else reads, so that a
  // row leaves in pieces of sixteen bytes.
  __device__ __forceinline__ void finish() {
    const float v_scale = p_.v_scale != nullptr ? p_.v_scale[w_.kv_head * p_.v_scale_stride] : 1.f;
    char* place = base_ + Layout::kQ;
    __syncwarp();
#pragma unroll
    for (int b = 0; b < Tr::kBlocks; ++b) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const int row = warp_row_ + 16 * b + lane_ / 4 + 8 * h;
        const sm90::RowPlace at = sm90::place_of_row(s_, w_, row);
        const float total = state_[b].total(h);
        const bool empty = total == 0.f;  // NaN is not empty: it must show
        const float lse = empty ? -INFINITY : state_[b].reference[h] * kLn2 + logf(total);
        float factor = empty ? 0.f : __fdividef(v_scale, total);
        if (kMayCut && w_.slab >= 0) {
          sm90::store_piece<Tr>(p_, s_, w_, row, lse, factor, h, lane_, out_[b]);
          continue;
        }
        if (at.exists) {
          if (p_.sinks != nullptr && !empty) factor = __fdividef(factor, 1.f + expf(p_.sinks[at.head] - lse));
          if (p_.lse != nullptr && lane_ % 4 == 0) {
            const int64_t token = static_cast<int64_t>(w_.first_q_token) + w_.first_token + at.token;
            p_.lse[token * p_.num_q_heads + at.head] = lse;
          }
        }
#pragma unroll
        for (int n = 0; n < Tr::kHeadDimV / 8; ++n) {
          const float* o = out_[b] + 4 * n + 2 * h;
          char* to = place + n / 8 * Tr::kRows * 128 + swizzled(row, n % 8) + lane_ % 4 * 4;
          *reinterpret_cast<uint32_t*>(to) = factor == 0.f ? 0u : pack2<T>(o[0] * factor, o[1] * factor);
        }
      }
    }
    __syncwarp();
    if (!kMayCut || w_.slab < 0) {
      store_rows(place);
    } else if (lane_ == 0) {
      sm90::count_piece(p_, 1);
    }
  }

  __device__ __forceinline__ void store_rows(const char* place) const {
    constexpr int kPieces = Tr::kHeadDimV / 8;
    T* out = static_cast<T*>(p_.out);
#pragma unroll 4
    for (int i = lane_; i < Tr::kWarpRows * kPieces; i += 32) {
      const int row = warp_row_ + i / kPieces, piece = i % kPieces;
      const auto [token, head, exists] = sm90::place_of_row(s_, w_, row);
      if (!exists || piece * 8 >= p_.head_dim_v) continue;
      const uint4 values =
          *reinterpret_cast<const uint4*>(place + piece / 8 * Tr::kRows * 128 + swizzled(row, piece % 8));
      T* to = out + (static_cast<int64_t>(w_.first_q_token) + w_.first_token + token) * p_.out_stride_token +
              head * p_.out_stride_head + piece * 8;
      if (rows_.out == Copy::kPieces) {
        *reinterpret_cast<uint4*>(to) = values;
      } else {
#pragma unroll
        for (int e = 0; e < 8; ++e) to[e] = reinterpret_cast<const T*>(&values)[e];
      }
    }
  }

  const Params& p_;
  const Schedule& s_;
  const Rows& rows_;
  const Work& w_;
  char* base_;
  int lane_, warp_row_;
  Loader<Tr, kInRow> loader_;
  bool transformed_ = false;
  float scale_, inner_scale_;
  int seen_begin_, seen_end_, full_begin_, full_end_;  // tiles of keys
  RowSums state_[Tr::kBlocks];
  float scores_[Tr::kBlocks][Tr::kKeys / 2];
  float out_[Tr::kBlocks][Tr::kHeadDimV / 2];
  uint32_t probabilities_[Tr::kBlocks][Tr::kKeys / 4];
};

}  // namespace attnops::fmha
