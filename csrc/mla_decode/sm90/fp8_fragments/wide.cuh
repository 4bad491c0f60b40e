#pragma once
#include "device/sm90/wgmma_few.cuh"
#include "device/sm90/wgmma_fp8.cuh"
#include "mla_decode/sm90/fp8_fragments/convert.cuh"
#include "mla_decode/sm90/fp8_fragments/epilogue.cuh"
#include "mla_decode/sm90/fp8_fragments/load.cuh"
#include "mla_decode/sm90/fp8_fragments/queries.cuh"

// 64 query rows. Two tiles go through at a time: each group computes the scores and probabilities of one of them, all
// 64 rows, and multiplies both with its 256 columns of V. Nothing but probabilities passes between the groups.
namespace attnops::mla_decode::sm90::fp8_fragments {

// The softmax of a transposed tile of scores by one warpgroup, [64 keys, 64 queries]: element 4 j + 2 h + e is key
// key_of(h) and query 8 j + 2 (lane % 4) + e. Both groups share the reference maxima, which lie in shared memory.
template <class At>
class WideSoftmax {
 public:
  static constexpr int kCount = At::kRows / 4;
  using Scores = float[At::kRows / 2];

  __device__ WideSoftmax(const Params& p, uint8_t* base, float kv_scale)
      : p_(p), base_(base), raw_scale_(p.softmax_scale * kv_scale * kLog2e) {}

  // Between two barriers of all that multiply.
  __device__ void begin(const Piece& piece) {
    clear_ = few_rows::keys_of_all_rows(p_, piece);
    if (threadIdx.x < At::kRows) {
      float* pair = reinterpret_cast<float*>(pairs() + threadIdx.x / 2) + threadIdx.x % 2 * 2;
      pair[0] = scales_first() ? 1.f : query_scale(threadIdx.x) * raw_scale_;
      pair[1] = kUnset;
    }
#pragma unroll
    for (float& x : sum_) x = 0.f;
  }

  // Raw scores of keys [first_key, first_key + 64) to probabilities, where the group has a tile. The reference maxima
  // may move: says so, and the factors of what was accumulated before are in shared memory. Where keys have scales,
  // `weight` is the base-2 logarithm of the largest of a key: softmax.cuh.
  __device__ bool tile(const Piece& piece, int first_key, bool has_tile, Scores& s, const float (&weight)[2]) {
    bool above = false;
    if (has_tile) {
      if (scales_first()) scale(s);
      if (first_key < clear_.begin || first_key + kPlanTileTokens > clear_.end || p_.report) mask(piece, first_key, s);
#pragma unroll
      for (int j = 0; j < At::kRows / 8; ++j) {
        const float4 pair = pair_of(j);
        above |= top(s, j, 0, pair.x, weight) > pair.y + (kLift + kSlack) ||
                 top(s, j, 1, pair.z, weight) > pair.w + (kLift + kSlack);
      }
    }
    const bool moved = attnops::sm90::named_barrier_or(kAll, At::kConsumerThreads, above);
    if (moved) move_references(has_tile, s, weight);
    if (!has_tile) return moved;
#pragma unroll
    for (int j = 0; j < At::kRows / 8; ++j) {
      const float4 pair = pair_of(j);
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        float &x = s[4 * j + 2 * h], &y = s[4 * j + 2 * h + 1];
        x = exp2_fast(fmaf(x, pair.x, -pair.y));
        y = exp2_fast(fmaf(y, pair.z, -pair.w));
        sum_[2 * j] += x;
        sum_[2 * j + 1] += y;
      }
    }
    return moved;
  }

  // Leaves what all warps must know of the rows in shared memory.
  __device__ void publish() const {
    float* sums = state<float>(At::kSums) + threadIdx.x / 32 * At::kRows;
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      const float sum = column_sum(sum_[i]);
      if (lane < 4) sums[query_of(i)] = sum;
    }
    if (threadIdx.x < At::kRows) {
      const float* pair = reinterpret_cast<const float*>(pairs() + threadIdx.x / 2) + threadIdx.x % 2 * 2;
      state<float>(At::kReference)[threadIdx.x] = pair[1] + kLift;
    }
  }

  __device__ float* factors() const { return state<float>(At::kFactor); }

 private:
  static constexpr float kUnset = -1e30f;  // of a row that saw no key yet: below every score

  template <typename X>
  __device__ X* state(int offset) const {
    return reinterpret_cast<X*>(base_ + At::kStates + offset);
  }
  // Of two neighbouring rows: what their raw scores are multiplied by, and then subtracted: reference - kLift.
  __device__ float4* pairs() const { return state<float4>(At::kRowPairs); }
  __device__ float4 pair_of(int j) const { return pairs()[4 * j + threadIdx.x % 4]; }
  __device__ float query_scale(int row) const { return reinterpret_cast<const float*>(base_ + At::kQueryScale)[row]; }

  // Only a positive scale commutes with the maximum, and a soft cap needs scaled scores.
  __device__ bool scales_first() const { return p_.logit_cap > 0.f || raw_scale_ <= 0.f; }

  // The larger of a query's two scores; where keys have scales, of its probabilities times the largest of those.
  __device__ static float top(const Scores& s, int j, int e, float scale, const float (&weight)[2]) {
    if constexpr (!At::kScaled) return fmaxf(s[4 * j + e], s[4 * j + 2 + e]) * scale;
    return fmaxf(fmaf(s[4 * j + e], scale, weight[0]), fmaf(s[4 * j + 2 + e], scale, weight[1]));
  }

  __device__ void scale(Scores& s) const {
    const float cap = p_.logit_cap * kLog2e, inner = p_.logit_cap > 0.f ? kLn2 / p_.logit_cap : 0.f;
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      const float by = query_scale(query_of(i)) * raw_scale_;
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        float& x = s[element_of(i, h)];
        x = p_.logit_cap > 0.f ? soft_capped(x * by * inner, cap) : x * by;
      }
    }
  }

  __device__ void mask(const Piece& piece, int first_key, Scores& s) const {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int key = first_key + key_of(h);
      const bool there = p_.report == nullptr || few_rows::has_page(p_, piece, key);
      uint32_t seen = 0;  // a bit per query, by a loop that is small: most tiles need none
#pragma unroll 1
      for (int i = 0; i < kCount; ++i) {
        const int row = min_of(query_of(i), piece.num_rows - 1);  // spare rows see what the last one sees
        const int token = row_place(p_, piece.first_row + row).token;
        seen |= static_cast<uint32_t>(there && few_rows::sees(p_, piece, token, key)) << i;
      }
#pragma unroll
      for (int i = 0; i < kCount; ++i) {
        if (!(seen >> i & 1)) s[element_of(i, h)] = -INFINITY;
      }
    }
  }

  // Takes the maxima of all warps; a reference follows where they are too far above it.
  __device__ void move_references(bool has_tile, const Scores& s, const float (&weight)[2]) {
    float* maxima = state<float>(At::kMaxima);
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
#pragma unroll
    for (int j = 0; j < At::kRows / 8; ++j) {
      const float4 pair = pair_of(j);
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        const float most = has_tile ? column_max(top(s, j, e, e == 0 ? pair.x : pair.z, weight)) : kUnset;
        if (lane < 4) maxima[warp * At::kRows + query_of(2 * j + e)] = most;
      }
    }
    named_barrier_sync(kAll, At::kConsumerThreads);
    if (threadIdx.x < At::kRows) {
      const int row = threadIdx.x;
      float most = kUnset;
#pragma unroll
      for (int w = 0; w < At::kSumWarps; ++w) most = fmaxf(most, maxima[w * At::kRows + row]);
      float* pair = reinterpret_cast<float*>(pairs() + row / 2) + row % 2 * 2;
      const float before = pair[1], after = most - kLift > before + kSlack ? most - kLift : before;
      pair[1] = after;
      factors()[row] = rescale_factor(before, after);
    }
    named_barrier_sync(kAll, At::kConsumerThreads);
#pragma unroll
    for (int i = 0; i < kCount; ++i) sum_[i] *= factors()[query_of(i)];
  }

  const Params& p_;
  uint8_t* const base_;
  const float raw_scale_;
  KvRange clear_;  // keys that need no mask
  float sum_[kCount];
};

template <typename T, class At>
class WideConsumer {
  using Scores = float[At::kRows / 2];
  using Output = float[kColumnTiles][At::kRows / 2];
  using Raw = uint32_t[4];           // e4m3 of two steps of 16, asked for a while before they are converted
  using Fragments = uint32_t[2][4];  // and as fp16
  static constexpr int kInFlight = 2;

 public:
  __device__ WideConsumer(const Params& p, bool out_aligned, uint8_t* base, uint32_t shared)
      : p_(p),
        out_aligned_(out_aligned),
        base_(base),
        shared_(shared),
        lane_(threadIdx.x % 32),
        warp_(threadIdx.x % kGroupThreads / 32),
        kv_scale_(p.kv_scale ? *p.kv_scale : 1.f),
        softmax_(p, base, kv_scale_) {}

  __device__ void run() {
    Walk<At> walk(p_);
    Piece piece;
    Output o;
    while (walk.next(p_, piece)) {
      // The barriers at the end of the piece before stand between its scores and these queries.
      load_queries<T, At>(p_, piece, base_, shared_);
      attnops::sm90::fence_async_proxy();
      named_barrier_sync(kAll, At::kConsumerThreads);
      softmax_.begin(piece);
      named_barrier_sync(kAll, At::kConsumerThreads);
#pragma unroll
      for (int m = 0; m < kColumnTiles; ++m) {
#pragma unroll
        for (float& x : o[m]) x = 0.f;
      }
#pragma unroll 1
      for (int t = 0; t < piece.num_tiles; t += 2) two_tiles(piece, t, o);
      count_ += piece.num_tiles;
      softmax_.publish();
      finish_piece<T, At>(p_, piece, place_, base_, kv_scale_, out_aligned_, o);
    }
  }

 private:
  __device__ void two_tiles(const Piece& piece, int t, Output& o) {
    const int own = t + place_.group;
    const bool has_own = own < piece.num_tiles;
    Scores s;
    float weight[2] = {};
    if (has_own) {
      wait_full(own);
      multiply_queries(own, s);
      if constexpr (At::kScaled) {
        for (int h = 0; h < 2; ++h) weight[h] = log2f(largest_scale(own, h));
      }
    }
    const int first_key = (piece.first_tile + own) * kPlanTileTokens;
    const bool moved = softmax_.tile(piece, first_key, has_own, s, weight);
    if (has_own) store_probabilities(own, s);
    wait_full(t);
    named_barrier_sync(kReady, At::kConsumerThreads);
    if (moved) rescale(o);
    multiply_values(t, 0, o);
    if (t + 1 < piece.num_tiles) {
      wait_full(t + 1);
      multiply_values(t + 1, 1, o);
    }
  }

  __device__ void wait_full(int t) const {
    const RingSlot<At> at(count_ + t);
    attnops::sm90::mbarrier_wait(At::full_barrier(shared_, at.slot), at.parity);
  }
  __device__ uint32_t tile_place(int t) const {
    return shared_ + At::kKv + RingSlot<At>(count_ + t).slot * At::kTileBytes;
  }

  // 16 keys of this warp, 32 columns of all 576.
  __device__ void load_keys(uint32_t tile, int i, Raw& r) const {
    const uint32_t place = tile + At::Rows::place(16 * warp_ + lane_ % 16, i / 2, lane_ / 16);
    attnops::sm90::load_fragment(r, i % 2 ? At::Rows::second_half(place) : place);
  }

  // Two steps of the rope part where that is 16 bit.
  __device__ void load_rope(uint32_t tile, int i, Fragments& a) const {
    const uint32_t row = tile + (16 * warp_ + lane_ % 16) * At::Rows::kRowBytes + At::Rows::kRope;
#pragma unroll
    for (int k = 0; k < 2; ++k) {
      attnops::sm90::load_fragment(a[k], row + (4 * i + 2 * k + lane_ / 16) * 16);
      if constexpr (std::is_same_v<T, __half>) {
#pragma unroll
        for (uint32_t& pair : a[k]) {
          const float2 x = unpack_pair(pair, __nv_bfloat16{});
          pair = attnops::sm90::pack_pair<__half>(x.x, x.y);
        }
      }
    }
  }

  // s = scores of the group's tile. Where keys have scales, what there is of the sum is multiplied between two blocks
  // of 128 columns by the quotient of their scales, and at last by the last: one accumulator is enough.
  __device__ void multiply_queries(int t, Scores& s) const {
    constexpr int kLoads = 2 * kPieces, kLatentLoads = kLoads - 2;
    const uint32_t tile = tile_place(t), queries = attnops::sm90::uniform_operand(shared_ + At::kQ);
    Fragments a[kInFlight];
    Raw r[2];
    load_keys(tile, 0, r[0]);
#pragma unroll
    for (int i = 0; i < kLoads; ++i) {
      Fragments& now = a[i % kInFlight];
      const bool is_rope = At::kScaled && i >= kLatentLoads;
      if (i + 1 < (At::kScaled ? kLatentLoads : kLoads)) load_keys(tile, i + 1, r[(i + 1) % 2]);
      if (At::kScaled && i > 0 && i <= kLatentLoads && i % 4 == 0) {
        attnops::sm90::wgmma_wait<0>(s);
        apply_scales(t, i / 4 - 1, s);
      } else if (i >= kInFlight) {
        attnops::sm90::wgmma_wait<kInFlight - 1>();
      }
      if constexpr (At::kScaled) {
        if (is_rope) load_rope(tile, i - kLatentLoads, now);
      }
      if (!is_rope) convert_keys(r[i % 2], now);
      attnops::sm90::wgmma_fence();
#pragma unroll
      for (int k = 0; k < 2; ++k) {
        const uint64_t operand = attnops::sm90::group_descriptor<1024>(queries + (i / 2 * At::kQueryPiece >> 4) +
                                                                       (i % 2 * 2 + k) * attnops::sm90::kStepKMajor);
        if (is_rope) {
          attnops::sm90::wgmma_few<T, At::kRows>(s, now[k], operand, 1);
        } else {
          attnops::sm90::wgmma_few<__half, At::kRows>(s, now[k], operand, i + k > 0);
        }
      }
      attnops::sm90::wgmma_commit();
    }
    attnops::sm90::wgmma_wait<0>(s);
  }

  __device__ float4 scales_of(int t, int h) const {
    const int slot = RingSlot<At>(count_ + t).slot;
    const uint8_t* row = base_ + At::kKv + slot * At::kTileBytes + key_of(h) * At::Rows::kRowBytes;
    return *reinterpret_cast<const float4*>(row + At::Rows::kScales);
  }

  // From sums under the scale of block `block` of 128 columns to sums under the next one's, or to true ones.
  __device__ void apply_scales(int t, int block, Scores& s) const {
    if constexpr (At::kScaled) {
      float by[2];
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const float4 x = scales_of(t, h);
        // A quotient needs a divisor: one that makes no difference. A NaN goes on.
        const float least = fmaxf(0x1p-60f * fmaxf(fmaxf(x.x, x.y), fmaxf(x.z, x.w)), 0x1p-100f);
        const auto clamped = [&](float scale) { return scale < least ? least : scale; };
        by[h] = block == 0   ? __fdividef(clamped(x.x), clamped(x.y))
                : block == 1 ? __fdividef(clamped(x.y), clamped(x.z))
                : block == 2 ? __fdividef(clamped(x.z), clamped(x.w))
                             : clamped(x.w);
      }
#pragma unroll
      for (int i = 0; i < At::kRows / 2; ++i) s[i] *= by[i / 2 % 2];
    }
  }

  // Of the scales of one of the thread's keys, in the range that the kernel minds.
  __device__ float largest_scale(int t, int h) const {
    const float4 x = scales_of(t, h);
    return fminf(fmaxf(fmaxf(fmaxf(x.x, x.y), fmaxf(x.z, x.w)), 0x1p-60f), 0x1p100f);
  }

  // Where keys have scales: probabilities are multiplied by the power of two in the key's largest, and V, in fp16, by
  // what then is left of each, at most 2. One of four lanes stores that of a key's block of 128 columns.
  __device__ void apply_powers(int t, Scores& s) const {
    const int block = lane_ % 4;
    float power[2];
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const uint32_t exponent = __float_as_uint(largest_scale(t, h)) & 0x7f800000u;
      power[h] = __uint_as_float(exponent);
      const float4 x = scales_of(t, h);
      const float own = block == 0 ? x.x : block == 1 ? x.y : block == 2 ? x.z : x.w;
      ratios(place_.group, block)[key_of(h)] = __float2half_rn(own * __uint_as_float((254u << 23) - exponent));
    }
#pragma unroll
    for (int i = 0; i < At::kRows / 2; ++i) s[i] *= power[i / 2 % 2];
  }

  // Of 64 keys.
  __device__ __half* ratios(int which, int block) const {
    return reinterpret_cast<__half*>(base_ + At::kStates + At::kRatios) + (which * 4 + block) * kPlanTileTokens;
  }

  // Rounded, with keys along the rows: row is a query, its 64 keys are dense.
  __device__ void store_probabilities(int t, Scores& s) const {
    if constexpr (At::kScaled) apply_powers(t, s);
    const int chunk = 2 * warp_ + lane_ / 8 % 2;
    const uint32_t place = shared_ + At::kP + place_.group * At::kQueryPiece;
#pragma unroll
    for (int row = 0; row < At::kRows; row += 16) {
      uint32_t pairs[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        pairs[i] = attnops::sm90::pack_pair<__half>(s[row / 2 + 2 * i], s[row / 2 + 2 * i + 1]);
      }
      const int own_row = row + 8 * (lane_ / 16) + lane_ % 8;
      attnops::sm90::store_transposed(pairs, place + attnops::sm90::swizzled(own_row, chunk));
    }
    attnops::sm90::fence_async_proxy();
  }

  // 16 columns of this warp in the group's blocks of 64, for half of the tile's tokens.
  __device__ void load_values(uint32_t tile, int i, Raw& r) const {
    const int token = lane_ + i % 2 * 32, piece = kColumnTiles * place_.group + i / 2;
    attnops::sm90::load_transposed(r, tile + At::Rows::place(token, piece, warp_));
  }

  __device__ void load_ratios(int which, int block, uint32_t (&ratio)[At::kScaled ? 8 : 1]) const {
    const auto* pairs = reinterpret_cast<const uint32_t*>(ratios(which, block)) + lane_ % 4;
#pragma unroll
    for (int i = 0; i < (At::kScaled ? 8 : 1); ++i) ratio[i] = pairs[4 * i];
  }

  __device__ static void scale_values(const uint32_t (&ratio)[At::kScaled ? 8 : 1], int half, Fragments& a) {
    if constexpr (At::kScaled) {
#pragma unroll
      for (int k = 0; k < 2; ++k) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const __half2 x = __hmul2(reinterpret_cast<const __half2&>(a[k][i]),
                                    reinterpret_cast<const __half2&>(ratio[4 * half + 2 * k + i / 2]));
          a[k][i] = reinterpret_cast<const uint32_t&>(x);
        }
      }
    }
  }

  // o += columns of V of tile t times its probabilities. The tile is given back when all of V has been read.
  __device__ void multiply_values(int t, int which, Output& o) const {
    constexpr int kLoads = 2 * kColumnTiles;
    const uint32_t tile = tile_place(t);
    const uint32_t probabilities = attnops::sm90::uniform_operand(shared_ + At::kP + which * At::kQueryPiece);
    Fragments a[kInFlight];
    Raw r[2];
    uint32_t ratio[At::kScaled ? 8 : 1];  // of tokens 8 i + 2 (lane % 4) + {0, 1}
    load_values(tile, 0, r[0]);
#pragma unroll
    for (int i = 0; i < kLoads; ++i) {
      Fragments& now = a[i % kInFlight];
      if (i + 1 < kLoads) load_values(tile, i + 1, r[(i + 1) % 2]);
      if (i >= kInFlight) attnops::sm90::wgmma_wait<kInFlight - 1>();
      convert_values(r[i % 2], now);
      if constexpr (At::kScaled) {
        if (i % 4 == 0) load_ratios(which, 2 * place_.group + i / 4, ratio);
        scale_values(ratio, i % 2, now);
      }
      attnops::sm90::wgmma_fence();
#pragma unroll
      for (int k = 0; k < 2; ++k) {
        const uint32_t operand = probabilities + (i % 2 * 2 + k) * attnops::sm90::kStepKMajor;
        attnops::sm90::wgmma_few<__half, At::kRows>(o[i / 2], now[k], attnops::sm90::group_descriptor<1024>(operand),
                                                    1);
      }
      attnops::sm90::wgmma_commit();
    }
    __syncwarp();
    attnops::sm90::mbarrier_arrive_if(At::empty_barrier(shared_, RingSlot<At>(count_ + t).slot), lane_ == 0);
    attnops::sm90::wgmma_wait<0>(o[0], o[1], o[2], o[3]);
  }

  __device__ void rescale(Output& o) const {
    const float* factors = softmax_.factors();
#pragma unroll
    for (int i = 0; i < At::kQueries; ++i) {
      const float factor = factors[query_of(i)];
#pragma unroll
      for (int m = 0; m < kColumnTiles; ++m) {
        o[m][element_of(i, 0)] *= factor;
        o[m][element_of(i, 1)] *= factor;
      }
    }
  }

  const Params& p_;
  const bool out_aligned_;  // rows of the output start on 4-byte boundaries
  uint8_t* const base_;
  const uint32_t shared_;
  const int lane_, warp_;
  const float kv_scale_;
  const Place place_;
  WideSoftmax<At> softmax_;
  int count_ = 0;  // tiles of the ring before this piece
};

}  // namespace attnops::mla_decode::sm90::fp8_fragments
