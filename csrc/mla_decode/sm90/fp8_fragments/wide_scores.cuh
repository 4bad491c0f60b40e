#pragma once
#include "device/sm90/wgmma_few.cuh"
#include "mla_decode/sm90/fp8_fragments/convert.cuh"
#include "mla_decode/sm90/fp8_fragments/load.cuh"
#include "mla_decode/sm90/fp8_fragments/queries.cuh"
#include "mla_decode/sm90/fp8_fragments/rounding.cuh"
#include "mla_decode/sm90/fp8_fragments/shared_scales.cuh"
#include "mla_decode/sm90/fp8_fragments/wide_softmax.cuh"

namespace attnops::mla_decode::sm90::fp8_fragments {

using Raw = uint32_t[4];           // e4m3 of two steps of 16, asked for a while before they are converted
using Fragments = uint32_t[2][4];  // and as fp16

// The warpgroup with the scores: S^T = K Q^T of every tile, and its probabilities, which it gives to the others.
template <typename T, class At>
class ScoreConsumer {
  using Scores = float[At::kRows / 2];
  using RowPairs = typename WideSoftmax<At>::RowPairs;
  static constexpr bool kHolds = WideSoftmax<At>::kHolds;
  static constexpr int kInFlight = kHolds ? 3 : 2, kAhead = At::kScaled || kHolds ? 3 : 2;  // products; loads
  static constexpr int kLoads = 2 * At::kPieces, kLatentLoads = kLoads - 2;                 // of 32 columns each
  static constexpr int kGiveAt = 14;  // of these, where no sum is scaled on the way

 public:
  __device__ ScoreConsumer(const Params& p, uint8_t* base, uint32_t shared)
      : p_(p),
        base_(base),
        shared_(shared),
        lane_(threadIdx.x % 32),
        warp_(threadIdx.x % kGroupThreads / 32),
        softmax_(p, base) {}

  __device__ void run() {
    Walk<At> walk = wide_walk<At>(p_, base_);
    Piece piece;
    while (walk.next(p_, piece)) {
      softmax_.begin(piece);
      attnops::sm90::mbarrier_wait(At::queries_barrier(shared_), parity_);
      count_ += kQueryStages;
      softmax_.take_scales();
      most_ = 0.f;
      if constexpr (At::kScaled || kHolds) {
        score_tiles(piece);
      } else {
        score_overlapped(piece);
      }
      parity_ ^= 1;
      const int parity = *reinterpret_cast<const volatile int*>(base_ + At::kParity);
      softmax_.publish(parity);
      if constexpr (At::kScaled) publish_most(parity);
      attnops::sm90::mbarrier_arrive(At::sums_barrier(shared_));
    }
  }

 private:
  // One tile after the other. The probabilities of a tile are given late under the scores of the next, or behind them:
  // their products then lie under its softmax, in which the matrix units would be idle.
  __device__ void score_tiles(const Piece& piece) {
    FewKeys few_keys;
#pragma unroll 1
    for (int t = 0; t < piece.num_tiles; ++t, ++count_, ++given_) {
      Scores s;
      RowPairs pairs;
      if constexpr (At::kShared) {
        multiply_shared(s);
      } else {
        multiply_queries(count_, s, [&](int i) {
          if (kHolds && i == kGiveAt) give_if(given_ - 1, t > 0);
        });
      }
      if constexpr (kHolds) attnops::sm90::wgmma_wait<1>();
      softmax_.load(pairs);
      if (!kHolds && t > 0) give(given_ - 1);
      bool rounds = false;
      if constexpr (At::kRounds) rounds = few_keys.in_tile<At>(base_, RingSlot<At>(count_).slot, warp_);
      attnops::sm90::wgmma_wait<0>(s);
      if constexpr (At::kRounds) {
        if (rounds) round_keys<At, kLatentLoads>(base_, shared_, RingSlot<At>(count_).slot, 0, s);
      }
      prepare_tile(piece, (piece.first_tile + t) * kPlanTileTokens, pairs, s);
#pragma unroll
      for (int j = 0; j < At::kRows / 8; ++j) softmax_.exponentiate(j, pairs, s);
      const int buffer = given_ % kWideBuffers;
      if constexpr (At::kScaled) apply_powers(RingSlot<At>(count_).slot, buffer, s);
#pragma unroll
      for (int row = 0; row < At::kRows; row += 16) store_probabilities(buffer, row, s);
    }
    give(given_ - 1);
  }

  // The exponentials of a tile between the first steps of the next one's scores: these are issued at the pace of the
  // matrix units, which leaves room. Early, for the ring's place of the tile is free when its values are multiplied.
  __device__ void score_overlapped(const Piece& piece) {
    Scores s;
    multiply_queries(count_, s, [](int) {});
    attnops::sm90::wgmma_wait<0>(s);
    int first_key = piece.first_tile * kPlanTileTokens;
#pragma unroll 1
    for (int left = piece.num_tiles; left > 0; --left, first_key += kPlanTileTokens) {
      RowPairs pairs;
      prepare_tile(piece, first_key, pairs, s);
      const int buffer = given_ % kWideBuffers;
      const auto finish = [&](int j) {
        softmax_.exponentiate(j, pairs, s);
        if (j % 2 == 1) store_probabilities(buffer, 8 * (j - 1), s);
      };
      ++count_, ++given_;
      if (left == 1) {
#pragma unroll
        for (int j = 0; j < At::kRows / 8; ++j) finish(j);
        give(given_ - 1);
        return;
      }
      Scores next;
      multiply_queries(count_, next, [&](int i) {
        if (i < At::kRows / 8) finish(i);
        if (i == At::kRows / 8) give(given_ - 1);
      });
      attnops::sm90::wgmma_wait<0>(next);
#pragma unroll
      for (int i = 0; i < At::kRows / 2; ++i) s[i] = next[i];
    }
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

  // Adds step i, 32 columns of keys, to the scores: one group of products, in flight.
  __device__ __forceinline__ static void multiply_columns(uint32_t queries, int i, bool is_rope, const Fragments& keys,
                                                          Scores& s) {
    attnops::sm90::wgmma_fence();
#pragma unroll
    for (int k = 0; k < 2; ++k) {
      const uint64_t operand = attnops::sm90::group_descriptor<1024>(queries + (i / 2 * At::kQueryPiece >> 4) +
                                                                     (i % 2 * 2 + k) * attnops::sm90::kStepKMajor);
      if (is_rope) {
        attnops::sm90::wgmma_few<T, At::kRows>(s, keys[k], operand, 1);
      } else {
        attnops::sm90::wgmma_few<__half, At::kRows>(s, keys[k], operand, i + k > 0);
      }
    }
    attnops::sm90::wgmma_commit();
  }

  // s = scores of the ring's tile number `count`, in flight. Where keys have scales, what there is of the sum is
  // multiplied between two blocks of 128 columns by the quotient of their scales, and at last by the last: one
  // accumulator is enough. `between` runs behind each step of 32 columns.
  template <class Between>
  __device__ void multiply_queries(int count, Scores& s, const Between& between) const {
    const RingSlot<At> at(count);
    const uint32_t tile = shared_ + At::kKv + at.slot * At::kTileBytes;
    const uint32_t queries = attnops::sm90::uniform_operand(shared_ + At::kQ);
    attnops::sm90::mbarrier_wait(At::full_barrier(shared_, at.slot), at.parity);
    Fragments a[kInFlight];
    Raw r[kAhead + 1];
#pragma unroll
    for (int i = 0; i < kAhead; ++i) load_keys(tile, i, r[i]);
#pragma unroll
    for (int i = 0; i < kLoads; ++i) {
      Fragments& now = a[i % kInFlight];
      const bool is_rope = At::kScaled && i >= kLatentLoads;
      if (i + kAhead < (At::kScaled ? kLatentLoads : kLoads))
        load_keys(tile, i + kAhead, r[(i + kAhead) % (kAhead + 1)]);
      if (At::kScaled && i > 0 && i <= kLatentLoads && i % 4 == 0) {
        attnops::sm90::wgmma_wait<0>(s);
        apply_scales(at.slot, i / 4 - 1, s);
      } else if (i >= kInFlight) {
        attnops::sm90::wgmma_wait<kInFlight - 1>();
      }
      if constexpr (At::kScaled) {
        if (is_rope) load_rope(tile, i - kLatentLoads, now);
      }
      if (!is_rope) convert_keys(r[i % (kAhead + 1)], now);
      multiply_columns(queries, i, is_rope, now, s);
      between(i);
    }
  }

  // The same of rows of 584 bytes. Scales are powers of two: K is multiplied by what they are beside the key's largest,
  // the sum by that. Then comes the rope part. It leaves the powers that the keys' values are to be divided by.
  __device__ void multiply_shared(Scores& s) {
    const RingSlot<At> at(count_);
    const uint32_t tile = shared_ + At::kKv + at.slot * At::kTileBytes;
    const uint32_t queries = attnops::sm90::uniform_operand(shared_ + At::kQ);
    attnops::sm90::mbarrier_wait(At::full_barrier(shared_, at.slot), at.parity);
    Fragments a[kInFlight];
    Raw r[kAhead + 1];
    uint32_t ratio[2];
#pragma unroll
    for (int i = 0; i < kAhead; ++i) load_keys(tile, i, r[i]);
    SharedScales scales[2] = {shared_scales(at.slot, 0), shared_scales(at.slot, 1)};
    uint32_t rope[2] = {};
#pragma unroll
    for (int i = 0; i < kLoads; ++i) {
      Fragments& now = a[i % kInFlight];
      const bool is_rope = i >= kLatentLoads;
      if (i + kAhead < kLatentLoads) load_keys(tile, i + kAhead, r[(i + kAhead) % (kAhead + 1)]);
      if (i == kLatentLoads) {
        attnops::sm90::wgmma_wait<0>(s);
        const float by[2] = {scales[0].largest_scale(), scales[1].largest_scale()};
#pragma unroll
        for (int k = 0; k < At::kRows / 2; ++k) s[k] *= by[k / 2 % 2];
      } else if (i >= kInFlight) {
        attnops::sm90::wgmma_wait<kInFlight - 1>();
      }
      if (is_rope) {
        load_shared_rope(tile, i - kLatentLoads, rope, now);
      } else {
        if (i % 2 == 0) ratio[0] = scales[0].ratio(i / 2), ratio[1] = scales[1].ratio(i / 2);
        convert_keys(r[i % (kAhead + 1)], now);
        scale_keys(ratio, now);
      }
      multiply_columns(queries, i, is_rope, now, s);
    }
#pragma unroll
    for (int h = 0; h < 2; ++h) exponent_[h] = scales[h].exponent_of_values(rope[h]);
  }

  __device__ SharedScales shared_scales(int slot, int h) const {
    const uint8_t* row = base_ + At::kKv + slot * At::kTileBytes + key_of(h) * At::Rows::kRowBytes;
    return SharedScales(*reinterpret_cast<const uint2*>(row + At::Rows::kScales));
  }

  // Two steps of the rope part, and the largest magnitudes so far of the thread's two keys, as bits of two bf16.
  __device__ void load_shared_rope(uint32_t tile, int i, uint32_t (&largest)[2], Fragments& a) const {
    const uint32_t row = tile + (16 * warp_ + lane_ % 16) * At::Rows::kRowBytes + At::Rows::kRope;
#pragma unroll
    for (int k = 0; k < 2; ++k) {
      attnops::sm90::load_fragment(a[k], row + (4 * i + 2 * k + lane_ / 16) * 16);
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        largest[j % 2] = __vmaxu2(largest[j % 2], a[k][j] & 0x7fff7fffu);
        if constexpr (std::is_same_v<T, __half>) {
          const float2 x = unpack_pair(a[k][j], __nv_bfloat16{});
          a[k][j] = attnops::sm90::pack_pair<__half>(x.x, x.y);
        }
      }
    }
  }

  __device__ static void scale_keys(const uint32_t (&ratio)[2], Fragments& a) {
#pragma unroll
    for (int k = 0; k < 2; ++k) {
#pragma unroll
      for (int i = 0; i < 4; ++i) a[k][i] = multiply_halves(a[k][i], ratio[i % 2]);
    }
  }

  // To the groups with values: the probabilities of tile number `count`.
  __device__ void give(int count) const {
    attnops::sm90::fence_async_proxy();
    attnops::sm90::mbarrier_arrive(At::given_barrier(shared_, count % kWideBuffers));
  }
  __device__ void give_if(int count, bool condition) const {
    attnops::sm90::fence_async_proxy();
    attnops::sm90::mbarrier_arrive_if(At::given_barrier(shared_, count % kWideBuffers), condition);
  }

  __device__ float4 scales_of(int slot, int h) const {
    const uint8_t* row = base_ + At::kKv + slot * At::kTileBytes + key_of(h) * At::Rows::kRowBytes;
    return *reinterpret_cast<const float4*>(row + At::Rows::kScales);
  }

  // From sums under the scale of block `block` of 128 columns to sums under the next one's, or to true ones.
  __device__ void apply_scales(int slot, int block, Scores& s) const {
    if constexpr (At::kScaled) {
      float by[2];
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const float4 x = scales_of(slot, h);
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
  __device__ float largest_scale(int slot, int h) const {
    const float4 x = scales_of(slot, h);
    return fminf(fmaxf(fmaxf(fmaxf(x.x, x.y), fmaxf(x.z, x.w)), 0x1p-60f), 0x1p100f);
  }

  // Before the exponentials of the tile that is scored: its buffer is free, and the factors are in it.
  __device__ void prepare_tile(const Piece& piece, int first_key, RowPairs& pairs, Scores& s) {
    const int slot = RingSlot<At>(count_).slot, buffer = given_ % kWideBuffers;
    float weight[2] = {};
    if constexpr (At::kShared) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        weight[h] = static_cast<float>(exponent_[h] - 127);
        most_ = fmaxf(most_, __uint_as_float(exponent_[h] << 23));
      }
    } else if constexpr (At::kScaled) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const float largest = largest_scale(slot, h);
        weight[h] = log2f(largest);
        most_ = fmaxf(most_, largest);
      }
    }
    attnops::sm90::mbarrier_wait(At::taken_barrier(shared_, buffer), (given_ / kWideBuffers & 1) ^ 1);
    const bool moved =
        softmax_.prepare(piece, first_key, s, weight, pairs, factors(buffer), listed_keys<At>(base_, slot));
    if (threadIdx.x % kGroupThreads == 0) reinterpret_cast<int*>(base_ + At::kMoved)[buffer] = moved;
  }

  __device__ float* factors(int buffer) const {
    return reinterpret_cast<float*>(base_ + At::kFactor) + buffer * At::kRows;
  }

  // Where keys have scales: probabilities are multiplied by the power of two in the key's largest, and V, in fp16, by
  // what then is left of each, at most 2. One of four lanes stores that of a key's block of 128 columns.
  __device__ void apply_powers(int slot, int buffer, Scores& s) const {
    const int block = lane_ % 4;
    auto* ratios = reinterpret_cast<__half*>(base_ + At::kRatios + buffer * At::kRatioBytes) + block * kPlanTileTokens;
    float power[2];
    if constexpr (At::kShared) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const SharedScales scales = shared_scales(slot, h);
        power[h] = __uint_as_float(exponent_[h] << 23);
        auto* own = reinterpret_cast<uint16_t*>(ratios + key_of(h));
        own[0] = static_cast<uint16_t>(SharedScales::quotient(scales.exponent(block), exponent_[h]));
        const uint32_t second = SharedScales::quotient(scales.exponent(4 + block), exponent_[h]);
        const uint32_t rope = (254 - exponent_[h]) << 7;  // bf16
        own[4 * kPlanTileTokens] = static_cast<uint16_t>(block == 3 ? rope : second);
      }
    }
#pragma unroll
    for (int h = 0; h < 2 && !At::kShared; ++h) {
      const uint32_t exponent = __float_as_uint(largest_scale(slot, h)) & 0x7f800000u;
      power[h] = __uint_as_float(exponent);
      const float4 x = scales_of(slot, h);
      const float own = block == 0 ? x.x : block == 1 ? x.y : block == 2 ? x.z : x.w;
      ratios[key_of(h)] = __float2half_rn(own * __uint_as_float((254u << 23) - exponent));
    }
#pragma unroll
    for (int i = 0; i < At::kRows / 2; ++i) s[i] *= power[i / 2 % 2];
  }

  // Rounded, of 16 queries from `row` on, with keys along the rows: row is a query, its 64 keys are dense.
  __device__ void store_probabilities(int buffer, int row, const Scores& s) const {
    int lane = lane_;
    asm volatile("" : "+r"(lane));  // places that were kept from tile to tile would be spilled
    const int chunk = 2 * warp_ + lane / 8 % 2;
    const uint32_t place = shared_ + At::kP + buffer * At::kQueryPiece;
    uint32_t pairs[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      pairs[i] = attnops::sm90::pack_pair<__half>(s[row / 2 + 2 * i], s[row / 2 + 2 * i + 1]);
    }
    const int own_row = row + 8 * (lane / 16) + lane % 8;
    attnops::sm90::store_transposed(pairs, place + attnops::sm90::swizzled(own_row, chunk));
  }

  // The largest scale that the piece has seen.
  __device__ void publish_most(int parity) const {
    const float most = column_max(most_);
    if (lane_ == 0) reinterpret_cast<float*>(base_ + At::kMost)[4 * parity + warp_] = most;
  }

  const Params& p_;
  uint8_t* const base_;
  const uint32_t shared_;
  const int lane_, warp_;
  WideSoftmax<At> softmax_;
  float most_ = 0.f;
  int exponent_[2];      // of rows of 584 bytes: biased, of the powers that divide the values of the thread's keys
  int count_ = 0;        // slots of the ring so far
  int given_ = 0;        // tiles
  uint32_t parity_ = 0;  // of the piece
};

}  // namespace attnops::mla_decode::sm90::fp8_fragments
