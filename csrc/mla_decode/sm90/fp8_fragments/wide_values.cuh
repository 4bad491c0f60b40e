#pragma once
#include "device/sm90/wgmma_few.cuh"
#include "device/sm90/wgmma_fp8.cuh"
#include "mla_decode/sm90/fp8_fragments/cluster_merge.cuh"
#include "mla_decode/sm90/fp8_fragments/convert.cuh"
#include "mla_decode/sm90/fp8_fragments/wide_queries.cuh"
#include "mla_decode/sm90/fp8_fragments/wide_scores.cuh"
#include "mla_decode/sm90/transposed_results.cuh"

namespace attnops::mla_decode::sm90::fp8_fragments {

// One of the two warpgroups with the output: O^T += V^T P of every tile, 256 columns of V each. They bring the queries,
// too: at the start of a piece they have nothing to multiply yet.
template <typename T, class At>
class ValueConsumer {
  static constexpr int kInFlight = 2, kAhead = 2;  // products; loads
  static constexpr int kBlocks = 4;                // of 64 columns
  using Output = TransposedOutput<At::kRows>;
  using Ratios = uint32_t[At::kScaled ? 8 : 1];  // fp16 pairs, of two tokens each

 public:
  __device__ ValueConsumer(const Params& p, bool out_aligned, uint8_t* base, uint32_t shared)
      : p_(p),
        out_aligned_(out_aligned),
        base_(base),
        shared_(shared),
        lane_(threadIdx.x % 32),
        warp_(threadIdx.x % kGroupThreads / 32),
        group_(__shfl_sync(0xffffffffu, threadIdx.x / kGroupThreads, 0)) {}

  __device__ void run() {
    Walk<At> walk = wide_walk<At>(p_, base_);
    Piece piece;
    Output o;
    bool more = walk.next(p_, piece);
    for (bool is_first = true; more || !is_first; is_first = false) {
      // First the next queries, whose place is free by now: the next piece's scores are computed while this is stored.
      int tiles = piece.num_tiles;
      if (more) take_queries(piece);
      if (!is_first) finish_piece(o);
      if (!more) return;
      parity_ ^= 1;
#pragma unroll
      for (int i = 0; i < kBlocks * At::kRows / 2; ++i) o[i % kBlocks][i / kBlocks] = 0.f;
#pragma unroll 1
      for (; tiles > 0; --tiles, ++count_, ++taken_) multiply_values(o);
      attnops::sm90::mbarrier_meet(At::sums_barrier(shared_));
      more = walk.next(p_, piece);
    }
  }

 private:
  // What is left to know of a piece when it is stored: registers are full of the output.
  __device__ StoredPiece* stored(int parity) const {
    return reinterpret_cast<StoredPiece*>(base_ + At::kStored) + parity;
  }

  // They come through the ring, in two slots of it.
  __device__ void take_queries(const Piece& piece) {
    const RingSlot<At> first(count_), second(count_ + 1);
    attnops::sm90::mbarrier_wait(At::full_barrier(shared_, first.slot), first.parity);
    attnops::sm90::mbarrier_wait(At::full_barrier(shared_, second.slot), second.parity);
    const auto place = [&](int slot) { return base_ + At::kKv + slot * At::kTileBytes; };
    if (threadIdx.x == 0) {
      *reinterpret_cast<int*>(base_ + At::kParity) = parity_ ^ 1;
      *stored(parity_ ^ 1) = {piece.request, piece.first_row, piece.num_rows, piece.partial};
    }
    convert_queries<T, At>(place(first.slot), place(second.slot), shared_ + At::kQ,
                           reinterpret_cast<float*>(base_ + At::kQueryScale));
    attnops::sm90::fence_async_proxy();
    attnops::sm90::mbarrier_arrive(At::queries_barrier(shared_));
    attnops::sm90::mbarrier_arrive(At::empty_barrier(shared_, first.slot));
    attnops::sm90::mbarrier_arrive(At::empty_barrier(shared_, second.slot));
    count_ += kQueryStages;
  }

  // 16 columns of this warp in the group's blocks of 64, for half of the tile's tokens.
  __device__ void load_values(uint32_t tile, int i, Raw& r) const {
    const int token = lane_ + i % 2 * 32, piece = kBlocks * group_ + i / 2;
    attnops::sm90::load_transposed(r, tile + At::Rows::place(token, piece, warp_));
  }

  // The rope part of rows of 584 bytes, for half of the tile's tokens, 16 columns of this warp in the last block: as
  // convert_values orders them.
  __device__ void load_rope_values(int slot, int half, const Ratios& ratio, Fragments& a) const {
    const uint8_t* first = base_ + At::kKv + slot * At::kTileBytes + (32 * half + lane_ % 4 * 2) * At::Rows::kRowBytes +
                           At::Rows::kRope + 32 * warp_ + lane_ / 4 * 4;
#pragma unroll
    for (int k = 0; k < 2; ++k) {
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        const uint32_t by = ratio[4 * half + 2 * k + j];
        float2 x[2];
#pragma unroll
        for (int token = 0; token < 2; ++token) {
          const auto* pair = first + (16 * k + 8 * j + token) * At::Rows::kRowBytes;
          const uint32_t twice = __byte_perm(by, 0, token == 0 ? 0x1010 : 0x3232);
          const auto scaled =
              __hmul2(*reinterpret_cast<const __nv_bfloat162*>(pair), reinterpret_cast<const __nv_bfloat162&>(twice));
          x[token] = unpack_pair(reinterpret_cast<const uint32_t&>(scaled), __nv_bfloat16{});
        }
        a[k][2 * j] = attnops::sm90::pack_pair<__half>(x[0].x, x[1].x);
        a[k][2 * j + 1] = attnops::sm90::pack_pair<__half>(x[0].y, x[1].y);
      }
    }
  }

  // Of tokens 8 i + 2 (lane % 4) + {0, 1}, for a block of columns.
  __device__ void load_ratios(int buffer, int block, Ratios& ratio) const {
    const auto* pairs = reinterpret_cast<const uint32_t*>(base_ + At::kRatios + buffer * At::kRatioBytes) +
                        block * (kPlanTileTokens / 2) + lane_ % 4;
#pragma unroll
    for (int i = 0; i < (At::kScaled ? 8 : 1); ++i) ratio[i] = pairs[4 * i];
  }

  __device__ static void scale_values(const Ratios& ratio, int half, Fragments& a) {
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

  // o += columns of V of the next tile times its probabilities; both are given back.
  __device__ void multiply_values(Output& o) const {
    constexpr int kLoads = 2 * kBlocks;
    const RingSlot<At> at(count_);
    const int buffer = taken_ % kWideBuffers;
    const uint32_t tile = shared_ + At::kKv + at.slot * At::kTileBytes;
    const uint32_t probabilities = attnops::sm90::uniform_operand(shared_ + At::kP + buffer * At::kQueryPiece);
    Fragments a[kInFlight];
    Raw r[kAhead + 1];
    Ratios ratio;
    attnops::sm90::mbarrier_wait(At::full_barrier(shared_, at.slot), at.parity);
#pragma unroll
    for (int i = 0; i < kAhead; ++i) load_values(tile, i, r[i]);
    attnops::sm90::mbarrier_wait(At::given_barrier(shared_, buffer), taken_ / kWideBuffers & 1);
    if (reinterpret_cast<const volatile int*>(base_ + At::kMoved)[buffer]) rescale(buffer, o);
#pragma unroll
    for (int i = 0; i < kLoads; ++i) {
      Fragments& now = a[i % kInFlight];
      if (i + kAhead < kLoads) load_values(tile, i + kAhead, r[(i + kAhead) % (kAhead + 1)]);
      if (i >= kInFlight) attnops::sm90::wgmma_wait<kInFlight - 1>();
      if constexpr (At::kShared) {
        if (i % 2 == 0) load_ratios(buffer, kBlocks * group_ + i / 2, ratio);
        if (i / 2 == kBlocks - 1 && group_ == 1) {
          load_rope_values(at.slot, i % 2, ratio, now);
        } else {
          convert_values(r[i % (kAhead + 1)], now);
          scale_values(ratio, i % 2, now);
        }
      } else {
        convert_values(r[i % (kAhead + 1)], now);
      }
      if constexpr (At::kScaled && !At::kShared) {
        if (i % 4 == 0) load_ratios(buffer, 2 * group_ + i / 4, ratio);
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
    attnops::sm90::mbarrier_arrive(At::empty_barrier(shared_, at.slot));
    attnops::sm90::wgmma_wait<0>(o[0], o[1], o[2], o[3]);
    attnops::sm90::mbarrier_arrive(At::taken_barrier(shared_, buffer));
  }

  __device__ void rescale(int buffer, Output& o) const {
    const float2* factors = reinterpret_cast<const float2*>(base_ + At::kFactor + buffer * At::kRows * 4) + lane_ % 4;
#pragma unroll
    for (int j = 0; j < At::kRows / 8; ++j) {
      const float2 factor = factors[4 * j];
#pragma unroll
      for (int b = 0; b < kBlocks; ++b) {
        o[b][4 * j + 0] *= factor.x;
        o[b][4 * j + 1] *= factor.y;
        o[b][4 * j + 2] *= factor.x;
        o[b][4 * j + 3] *= factor.y;
      }
    }
  }

  __device__ void finish_piece(Output& o) const {
    Piece piece;
    piece.request = stored(parity_)->request, piece.first_row = stored(parity_)->first_row;
    piece.num_rows = stored(parity_)->num_rows, piece.partial = stored(parity_)->partial;
    constexpr float kMostValue = At::kShared ? 0x1p15f : 448.f;
    if constexpr (At::kCluster) {
      if (piece.partial > 0) return finish_in_cluster(piece, o);
    }
    TransposedEnds& ends = *reinterpret_cast<TransposedEnds*>(base_ + At::kEnds);
    if (threadIdx.x < At::kRows) {
      const int row = threadIdx.x;
      const float* sums = reinterpret_cast<const float*>(base_ + At::totals(parity_)) + row;
      float sum = 0.f, bound = kMostValue;
#pragma unroll
      for (int warp = 0; warp < 4; ++warp) sum += sums[warp * At::kRows];
      if constexpr (At::kScaled) {
        const float4 most = *reinterpret_cast<const float4*>(base_ + At::kMost + 16 * parity_);
        bound *= fmaxf(fmaxf(most.x, most.y), fmaxf(most.z, most.w));
      }
      end_row<At::kOptions>(p_, piece, row, sum, sums[4 * At::kRows], p_.kv_scale ? *p_.kv_scale : 1.f, bound, ends);
    }
    named_barrier_sync(kValueWarps, kValueThreads);
    store_transposed<T, At::kOptions>(p_, piece, ends, group_, out_aligned_, o);
  }

  __device__ void finish_in_cluster(const Piece& piece, const Output& o) const {
    float sum = 0.f, reference = 0.f;
    if (threadIdx.x < At::kRows) {
      const float* sums = reinterpret_cast<const float*>(base_ + At::totals(parity_)) + threadIdx.x;
#pragma unroll
      for (int warp = 0; warp < 4; ++warp) sum += sums[warp * At::kRows];
      reference = sums[4 * At::kRows];
    }
    typename ClusterMerge<T, At>::Vectors own;
#pragma unroll
    for (int v = 0; v < 2 * kBlocks; ++v) {
      const float* x = o[v / 2] + v % 2 * 4;
      own[v] = make_float4(x[0], x[1], x[2], x[3]);
    }
    attnops::sm90::cluster_wait();  // all CTAs have their barriers
    ClusterMerge<T, At>(p_, piece, piece.partial, base_, shared_).run(sum, reference, own, out_aligned_);
  }

  const Params& p_;
  const bool out_aligned_;  // rows of the output start on 4-byte boundaries
  uint8_t* const base_;
  const uint32_t shared_;
  const int lane_, warp_, group_;
  int count_ = 0;   // slots of the ring so far
  int taken_ = 0;   // tiles
  int parity_ = 1;  // of the piece
};

}  // namespace attnops::mla_decode::sm90::fp8_fragments
