#pragma once
#include "device/sm90/wgmma_few.cuh"
#include "device/sm90/wgmma_fp8.cuh"
#include "mla_decode/sm90/fp8_fragments/convert.cuh"
#include "mla_decode/sm90/fp8_fragments/epilogue.cuh"
#include "mla_decode/sm90/fp8_fragments/layout.h"
#include "mla_decode/sm90/fp8_fragments/load.cuh"
#include "mla_decode/sm90/fp8_fragments/queries.cuh"
#include "mla_decode/sm90/fp8_fragments/rounding.cuh"
#include "mla_decode/sm90/fp8_fragments/softmax.cuh"

// MLA decode on Hopper for few query rows over FP8 caches, in fp16 arithmetic; docs/kernels/mla_decode_fp8.md.
//
// Products are transposed, as in the kernel for 16-bit caches (few_rows/kernel.cuh), so that K and V^T are first
// operands of wgmma, which may lie in registers: that is where e4m3 becomes fp16. Two teams take the tiles of a piece
// in turns, each with an accumulator of its own; while one converts or waits, the other multiplies.
//
//   S^T [64, kRows] = K Q^T, each group of a team over its half of the 576 columns
//   the groups exchange scores, so that each has half of the rows whole; softmax, P to shared memory
//   O^T [512, kRows] += V^T P, each group for its 256 columns of V
//
// All groups run the same code: it is read from memory once.
namespace attnops::mla_decode::sm90::fp8_fragments {

using attnops::sm90::fence_async_proxy;
using attnops::sm90::group_descriptor;
using attnops::sm90::mbarrier_wait;
using attnops::sm90::named_barrier_sync;
using attnops::sm90::wgmma_few;

template <typename T, class At>
class Consumer {
  using Scores = float[At::kRows / 2];
  using SoftmaxScores = typename Softmax<At>::Scores;
  using Output = float[kColumnTiles][At::kRows / 2];
  using Raw = uint32_t[4];           // e4m3 of two steps of 16, asked for a while before they are converted
  using Fragments = uint32_t[2][4];  // and as fp16
  static constexpr int kInFlight = At::kScaled ? 2 : 3;  // Fragments
  static constexpr int kSums = At::kScaled ? 3 : 1;      // of scores: their scales apply when they are complete

 public:
  __device__ Consumer(const Params& p, bool out_aligned, uint8_t* base, uint32_t shared)
      : p_(p),
        out_aligned_(out_aligned),
        base_(base),
        shared_(shared),
        lane_(threadIdx.x % 32),
        warp_(threadIdx.x % kGroupThreads / 32),
        kv_scale_(p.kv_scale ? *p.kv_scale : 1.f) {}

  __device__ void run() {
    Walk<At> walk(p_);
    Piece piece;
    Output o;
    while (walk.next(p_, piece)) {
      // The barriers at the end of the piece before stand between its scores and these queries.
      load_queries<T, At>(p_, piece, base_, shared_);
      fence_async_proxy();
      named_barrier_sync(kAll, At::kConsumerThreads);
      rows_.begin(p_, piece, base_, kv_scale_);
#pragma unroll
      for (int m = 0; m < kColumnTiles; ++m) {
#pragma unroll
        for (float& x : o[m]) x = 0.f;
      }
#pragma unroll 1
      for (int t = place().team; t < piece.num_tiles; t += At::kTeams) {
        const RingSlot<At> at(count_ + t);
        mbarrier_wait(At::full_barrier(shared_, at.slot), at.parity);
        Scores s;
        multiply_queries(at.slot, s);
        if constexpr (At::kRounds) {
          // By tile: a count that goes on would cost calls that do not ask a register.
          if (rounds_keys(p_) && FewKeys().template in_tile<At>(base_, at.slot, warp_)) {
            round_keys<At, kLatentLoads>(base_, shared_, at.slot, kLatentLoads * place().group, s);
          }
        }
        SoftmaxScores own;
        exchange_scores(s, own);
        const KeyScales scales = load_scales(at.slot);
        rows_.tile(p_, piece, (piece.first_tile + t) * kPlanTileTokens, own, scales.weight,
                   listed_keys<At>(base_, at.slot), base_, shared_);
        store_probabilities(own, scales);
        multiply_values(place_of(at.slot), At::empty_barrier(shared_, at.slot), o);
      }
      count_ += piece.num_tiles;
      if (place().team == 1 && piece.num_tiles % 2 == 1) pass_barriers_of_tile();
      publish_rows(rows_, base_);
      finish_piece<T, At>(p_, piece, place(), base_, kv_scale_, out_aligned_, o);
    }
  }

 private:
  __device__ const Place& place() const { return rows_.place; }

  // As many as a team passes in a tile.
  __device__ void pass_barriers_of_tile() const {
#pragma unroll
    for (int i = 0; i < 3; ++i) named_barrier_sync(kTeamScores + place().team, kTeamThreads);
  }

  __device__ uint32_t place_of(int slot) const { return shared_ + At::kKv + slot * At::kTileBytes; }

  // Of the thread's two keys, where they have scales: those, by 128 columns, and the logarithm of the largest.
  struct KeyScales {
    float4 scale[At::kScaled ? 2 : 1];
    float weight[2];

    __device__ float of(int h, int block) const {
      const float4& x = scale[h];
      return block == 0 ? x.x : block == 1 ? x.y : block == 2 ? x.z : x.w;
    }
  };

  __device__ const float* scales_of(int slot, int h) const {
    const uint8_t* row = base_ + At::kKv + slot * At::kTileBytes + key_of(h) * At::Rows::kRowBytes;
    return reinterpret_cast<const float*>(row + At::Rows::kScales);
  }

  __device__ KeyScales load_scales(int slot) const {
    KeyScales scales = {};
    if constexpr (At::kScaled) {
      constexpr float kLeast = 0x1p-60f;  // below it, probabilities may lose bits
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const float4 x = *reinterpret_cast<const float4*>(scales_of(slot, h));
        scales.scale[h] = x;
        scales.weight[h] = log2f(fmaxf(fmaxf(fmaxf(x.x, x.y), fmaxf(x.z, x.w)), kLeast));
      }
    }
    return scales;
  }

  // A group's 288 columns: four pieces of the latent and half of the rope's.
  static constexpr int kLatentLoads = 8;  // of 32 columns

  // 16 keys of this warp, load number `i` of the group's part of the latent.
  __device__ void load_keys(uint32_t tile, int i, Raw& r) const {
    const uint32_t place =
        tile + At::Rows::place(16 * warp_ + lane_ % 16, kColumnTiles * this->place().group + i / 2, lane_ / 16);
    attnops::sm90::load_fragment(r, i % 2 ? At::Rows::second_half(place) : place);
  }

  // The group's half of the rope part: e4m3 that are to be converted,
  __device__ void load_rope(uint32_t tile, Raw& r) const {
    const uint32_t place = tile + At::Rows::place(16 * warp_ + lane_ % 16, kPieces - 1, lane_ / 16);
    attnops::sm90::load_fragment(r, this->place().group == 1 ? At::Rows::second_half(place) : place);
  }

  // or 16 bit.
  __device__ void load_rope(uint32_t tile, Fragments& a) const {
    const int token = 16 * warp_ + lane_ % 16;
#pragma unroll
    for (int k = 0; k < 2; ++k) {
      const int chunk = 4 * place().group + 2 * k + lane_ / 16;
      attnops::sm90::load_fragment(a[k], tile + token * At::Rows::kRowBytes + At::Rows::kRope + chunk * 16);
      if constexpr (std::is_same_v<T, __half>) {
#pragma unroll
        for (uint32_t& pair : a[k]) {
          const float2 x = unpack_pair(pair, __nv_bfloat16{});
          pair = attnops::sm90::pack_pair<__half>(x.x, x.y);
        }
      }
    }
  }

  // s = this group's half of the scores. Fragments are in use until their product is done: some are multiplied while
  // others are made.
  __device__ void multiply_queries(int slot, Scores& s) const {
    const int group = place().group;
    const uint32_t tile = place_of(slot);
    const uint32_t queries = attnops::sm90::uniform_operand(shared_ + At::kQ + kColumnTiles * group * At::kQueryPiece);
    const uint32_t rope = attnops::sm90::uniform_operand(shared_ + At::kQ + (kPieces - 1) * At::kQueryPiece) +
                          2 * group * attnops::sm90::kStepKMajor;
    Scores sums[kSums];
    Fragments a[kInFlight];
    Raw r[2];
    load_keys(tile, 0, r[0]);
#pragma unroll
    for (int i = 0; i <= kLatentLoads; ++i) {
      constexpr int kLoadsPerSum = At::kScaled ? kLatentLoads / 2 : kLatentLoads + 1;
      Fragments& now = a[i % kInFlight];
      Scores& sum = sums[i / kLoadsPerSum];
      const bool begins = i % kLoadsPerSum == 0;
      if (i + 1 < kLatentLoads) load_keys(tile, i + 1, r[(i + 1) % 2]);
      if constexpr (!At::kScaled) {
        if (i + 1 == kLatentLoads) load_rope(tile, r[(i + 1) % 2]);
      }
      if (i >= kInFlight) attnops::sm90::wgmma_wait<kInFlight - 1>();
      if constexpr (At::kScaled) {
        if (i == kLatentLoads) load_rope(tile, now);
      }
      if (!At::kScaled || i < kLatentLoads) convert_keys(r[i % 2], now);
      const uint32_t columns =
          i < kLatentLoads ? queries + (i / 2 * At::kQueryPiece >> 4) + i % 2 * 2 * attnops::sm90::kStepKMajor : rope;
      attnops::sm90::wgmma_fence();
#pragma unroll
      for (int k = 0; k < 2; ++k) {
        const uint64_t operand = group_descriptor<1024>(columns + k * attnops::sm90::kStepKMajor);
        if (At::kScaled && i == kLatentLoads) {
          wgmma_few<T, At::kRows>(sum, now[k], operand, k > 0);
        } else {
          wgmma_few<__half, At::kRows>(sum, now[k], operand, !begins || k > 0);
        }
      }
      attnops::sm90::wgmma_commit();
    }
    if constexpr (At::kScaled) {
      attnops::sm90::wgmma_wait<0>(sums[0], sums[1], sums[2]);
      add_scaled(slot, 0, sums[0], s);
      add_scaled(slot, 1, sums[1], s);
      add_scaled(slot, 2, sums[2], s);
    } else {
      attnops::sm90::wgmma_wait<0>(sums[0]);
      add_scaled(slot, 0, sums[0], s);
    }
  }

  // Where keys have scales, the group's scores are three sums: of 128 columns, of 128 more, each with a scale, and
  // rope.
  __device__ void add_scaled(int slot, int number, const Scores& sum, Scores& s) const {
    float scale[2] = {1.f, 1.f};
    if constexpr (At::kScaled) {
#pragma unroll
      for (int h = 0; h < 2 && number < 2; ++h) scale[h] = scales_of(slot, h)[2 * place().group + number];
    }
#pragma unroll
    for (int i = 0; i < At::kRows / 2; ++i) {
      const float x = number < 2 ? sum[i] * scale[i / 2 % 2] : sum[i];
      s[i] = number == 0 ? x : s[i] + x;
    }
  }

  // Gives the other group its half of the rows, and completes the own half.
  __device__ void exchange_scores(const Scores& s, SoftmaxScores& own) const {
    few_rows::exchange_halves<At>(reinterpret_cast<float4*>(base_ + At::kScores + place().team * At::kScoresBytes),
                                  place().group, s, own,
                                  [&] { named_barrier_sync(kTeamScores + place().team, kTeamThreads); });
  }

  __device__ uint32_t probabilities() const { return shared_ + At::kP + place().team * At::kProbabilityBytes; }

  // Times the scales of V where it has some: then the four times 128 columns have probabilities of their own.
  __device__ void store_probabilities(const SoftmaxScores& s, const KeyScales& scales) const {
    if constexpr (At::kScaled) {
#pragma unroll
      for (int block = 0; block < 4; ++block) {
        SoftmaxScores scaled;
#pragma unroll
        for (int i = 0; i < At::kSoftmaxRows / 2; ++i) scaled[i] = s[i] * scales.of(i / 2 % 2, block);
        store_rounded(scaled, probabilities() + block * At::kQueryPiece);
      }
    } else {
      store_rounded(s, probabilities());
    }
    fence_async_proxy();
  }

  // Rounded, with keys along the rows: row is a query, its 64 keys are dense.
  __device__ void store_rounded(const SoftmaxScores& s, uint32_t place) const {
    const int chunk = 2 * warp_ + lane_ / 8 % 2;
    const uint32_t half = place + rows_.first_row() * 128;
    const uint32_t pairs[2] = {attnops::sm90::pack_pair<__half>(s[0], s[1]),
                               attnops::sm90::pack_pair<__half>(s[2], s[3])};
    attnops::sm90::store_transposed(pairs, half + attnops::sm90::swizzled(lane_ % 8, chunk));
  }

  // Load number `i` of V: 16 columns of this warp in the group's blocks of 64, for half of the tile's tokens.
  __device__ void load_values(uint32_t tile, int i, Raw& r) const {
    const int block = i / 2, half = i % 2;
    const int token = lane_ + 32 * half, piece = kColumnTiles * place().group + block;
    attnops::sm90::load_transposed(r, tile + At::Rows::place(token, piece, warp_));
  }

  // o += columns of V times the probabilities. The tile is given back when all of V has been read.
  __device__ void multiply_values(uint32_t tile, uint32_t empty_barrier, Output& o) const {
    constexpr int kLoads = 2 * kColumnTiles;
    const uint32_t operand =
        attnops::sm90::uniform_operand(probabilities() + (At::kScaled ? 2 * place().group * At::kQueryPiece : 0));
    Fragments a[kInFlight];
    Raw r[2];
    load_values(tile, 0, r[0]);
    load_values(tile, 1, r[1]);
    convert_values(r[0], a[0]);
    named_barrier_sync(kTeamProbabilities + place().team, kTeamThreads);
    rescale(o);
#pragma unroll
    for (int i = 0; i < kLoads; ++i) {
      attnops::sm90::wgmma_fence();
#pragma unroll
      for (int k = 0; k < 2; ++k) {
        wgmma_few<__half, At::kRows>(o[i / 2], a[i % kInFlight][k],
                                     group_descriptor<1024>(operand + (At::kScaled ? i / 4 * At::kQueryPiece >> 4 : 0) +
                                                            (i % 2 * 2 + k) * attnops::sm90::kStepKMajor),
                                     1);
      }
      attnops::sm90::wgmma_commit();
      if (i + 2 < kLoads) load_values(tile, i + 2, r[i % 2]);
      if (i + 1 == kLoads) break;
      if (i + 1 >= kInFlight) attnops::sm90::wgmma_wait<kInFlight - 1>();
      convert_values(r[(i + 1) % 2], a[(i + 1) % kInFlight]);
    }
    attnops::sm90::mbarrier_arrive(empty_barrier);
    attnops::sm90::wgmma_wait<0>(o[0], o[1], o[2], o[3]);
  }

  __device__ void rescale(Output& o) const {
    const volatile int* moved = reinterpret_cast<const volatile int*>(rows_.state(base_) + At::kMoved);
    if (moved[0]) rescale_queries<0, At::kQueries / 2>(o);
    if (moved[1]) rescale_queries<At::kQueries / 2, At::kQueries>(o);
  }

  template <int kBegin, int kEnd>
  __device__ void rescale_queries(Output& o) const {
    const float* factors = reinterpret_cast<const float*>(rows_.state(base_) + At::kFactor);
#pragma unroll
    for (int i = kBegin; i < kEnd; ++i) {
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
  Softmax<At> rows_;
  int count_ = 0;  // tiles of the ring before this piece
};

template <class At>
__device__ inline void init_barriers(uint32_t shared) {
  for (int slot = 0; slot < At::kRingTiles; ++slot) {
    attnops::sm90::mbarrier_init(At::full_barrier(shared, slot), 32 * kLoadingWarps);
    attnops::sm90::mbarrier_init(At::empty_barrier(shared, slot), kTeamThreads);
  }
  for (int group = 0; group < At::kTeams * kGroups; ++group) {
    attnops::sm90::mbarrier_init(shared + At::kMoveBarriers + 8 * group, kGroupThreads);
  }
  if constexpr (At::kCluster) attnops::sm90::mbarrier_init(shared + At::kMergeBarrier, 1);
  attnops::sm90::mbarrier_init_fence();
}

template <typename T, class At>
__global__ void __launch_bounds__(At::kThreads, 1)
    mla_decode_fp8_fragments_kernel(const __grid_constant__ Params p, const __grid_constant__ CUtensorMap map,
                                    const __grid_constant__ Modes modes, const bool out_aligned) {
  extern __shared__ __align__(1024) uint8_t shared_bytes[];
  const uint32_t shared = attnops::sm90::smem_address(shared_bytes);
  if (threadIdx.x == 0) {
    init_barriers<At>(shared);
    if (modes.use_boxes) attnops::sm90::prefetch_map(&map);
  }
  __syncthreads();
  if constexpr (At::kCluster) attnops::sm90::cluster_arrive_relaxed();
  attnops::sm90::wait_for_prerequisites();
  if (threadIdx.x < At::kConsumerThreads) {
    attnops::sm90::registers_increase<At::kConsumerRegisters>();
    Consumer<T, At>(p, out_aligned, shared_bytes, shared).run();
  } else {
    attnops::sm90::registers_decrease<At::kLoaderRegisters>();
    Loader<At> loader(p, &map, modes, shared_bytes, shared);
    if constexpr (At::kShort) {
      loader.run_short();
    } else {
      loader.run();
    }
  }
}

}  // namespace attnops::mla_decode::sm90::fp8_fragments
