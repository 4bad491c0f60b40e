#pragma once
#include "mla_decode/sm90/epilogue.cuh"
#include "mla_decode/sm90/fp8/layout.h"
#include "mla_decode/sm90/fp8/load.cuh"
#include "mla_decode/sm90/softmax.cuh"
#include "mla_decode/sm90/tile_products.cuh"

// MLA decode over FP8 caches in 16-bit arithmetic; docs/kernels/mla_decode_fp8.md.
//
// The schedule is that of the 16-bit kernel (docs/kernels/mla_decode_sm90.md): two warpgroups share the accumulator by
// columns, group 0 computes the scores of even tiles, group 1 those of odd ones, and both apply both. What differs is
// how a tile arrives: the loading warpgroup converts it.
namespace attnops::mla_decode::sm90::fp8 {

using attnops::sm90::fence_async_proxy;
using attnops::sm90::operand_descriptor;
using attnops::sm90::wgmma_commit;
using attnops::sm90::wgmma_fence;
using attnops::sm90::wgmma_wait;

template <typename T, int kGroup>
class Consumer {
 public:
  __device__ Consumer(const Params& p, bool out_aligned, uint8_t* base, uint32_t shared)
      : p_(p),
        out_aligned_(out_aligned),
        base_(base),
        shared_(shared),
        lane_(threadIdx.x % 32),
        kv_scale_(p.kv_scale ? *p.kv_scale : 1.f) {}

  __device__ void run() {
    PieceWalk walk(p_);
    Piece piece;
    float s[32], o[128];
    for (int count = 0; walk.next(p_, piece); ++count) {
      rows_.begin(p_, piece);
      mbarrier_wait(shared_ + kQueriesFull, count & 1);
      fence_async_proxy();
      load_rope_queries();
#pragma unroll
      for (int i = 0; i < 128; ++i) o[i] = 0.f;
      for (int t = 0; t < piece.num_tiles; t += 2) {
        if constexpr (kGroup == 0) {
          step_even(piece, t, s, o);
        } else {
          step_odd(piece, t, s, o);
        }
      }
      release_queries();
      const RowSums sums = exchange_sums(rows_, reinterpret_cast<float*>(base_ + kSums), count & 1, kGroup);
#pragma unroll
      for (int i = 0; i < 128; ++i) o[i] *= kv_scale_;
      store_rows<T>(p_, piece, rows_, sums, kGroup, out_aligned_, o);
    }
  }

 private:
  // The steps take a pair of tiles, t and t + 1.

  // Group 0: scores and softmax of tile t, its product, then that of tile t + 1 with the other group's probabilities.
  __device__ void step_even(const Piece& piece, int t, float (&s)[32], float (&o)[128]) {
    const int tile = piece.first_tile + t;
    multiply_queries(0, s);
    if (t + 1 < piece.num_tiles) attnops::sm90::named_barrier_arrive(kScores0, kConsumerThreads);
    wgmma_wait<0>(s);
    release(0, kPartRope);

    float factor[kRowsPerThread];
    scale_scores(s);
    softmax_tile(p_, piece, rows_, tile * kPlanTileTokens, s, factor, [] {});
    uint32_t a[4][4];
    give_probabilities(kP0, s, a);
    attnops::sm90::named_barrier_arrive(kProbabilities0, kConsumerThreads);
    rescale(o, factor);
    multiply_values(a, 0, o);
    flip_parity(0);
    wgmma_wait<0>(o);
    release(0, kPartLeft);
    if (t + 1 < piece.num_tiles) {
      attnops::sm90::named_barrier_sync(kProbabilities1, kConsumerThreads);
      follow_maximum(rows_, maxima(1), factor);
      rescale(o, factor);
      wait_part(1, kPartLeft);
      multiply_values(kP1, 1, o);
      flip_parity(1);
      wgmma_wait<0>(o);
      release(1, kPartLeft);
    }
  }

  // Group 1: scores of tile t + 1; the product of tile t with the other group's probabilities, and under it the
  // softmax of tile t + 1; then its product.
  __device__ void step_odd(const Piece& piece, int t, float (&s)[32], float (&o)[128]) {
    const int tile = piece.first_tile + t;
    const bool has_odd = t + 1 < piece.num_tiles;
    if (has_odd) {
      // Scores of both tiles at once would finish together, and leave the matrix units idle under both softmaxes.
      attnops::sm90::named_barrier_sync(kScores0, kConsumerThreads);
      multiply_queries(1, s);
      wgmma_wait<0>(s);
      release(1, kPartRope);
    }

    float factor[kRowsPerThread];
    attnops::sm90::named_barrier_sync(kProbabilities0, kConsumerThreads);
    follow_maximum(rows_, maxima(0), factor);
    rescale(o, factor);
    wait_part(0, kPartRight);
    multiply_values(kP0, 0, o);
    flip_parity(0);
    if (!has_odd) {
      wgmma_wait<0>(o);
      release(0, kPartRight);
      return;
    }

    scale_scores(s);
    softmax_tile(p_, piece, rows_, (tile + 1) * kPlanTileTokens, s, factor, [&] {
      wgmma_wait<0>(o);
      release(0, kPartRight);
    });
    uint32_t a[4][4];
    give_probabilities(kP1, s, a);
    attnops::sm90::named_barrier_arrive(kProbabilities1, kConsumerThreads);
    rescale(o, factor);
    multiply_values(a, 1, o);
    flip_parity(1);
    wgmma_wait<0>(o);
    release(1, kPartRight);
  }

  __device__ uint32_t kv_tile(int buffer, int tile) const {
    return shared_ + kKv + buffer * kOperandBytes + tile * kTileBytes;
  }

  // Fragment address of this warp's sixteen rows in a K-major tile, step kk.
  __device__ uint32_t fragment(int tile_offset, int kk) const {
    const int row = threadIdx.x % kGroupThreads / 32 * 16 + lane_ % 16;
    return shared_ + tile_offset + attnops::sm90::swizzled(row, kk * 2 + lane_ / 16);
  }

  __device__ void load_rope_queries() {
#pragma unroll
    for (int kk = 0; kk < 4; ++kk) attnops::sm90::load_fragment(q_rope_[kk], fragment(kQ + kRopeTile * kTileBytes, kk));
  }

  // s = scores, in the order of the parts' arrival, in flight.
  __device__ void multiply_queries(int buffer, float (&s)[32]) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int part = half == kGroup ? kPartLeft : kPartRight;
      wait_part(buffer, part);
      if (half == 0) wgmma_fence();
#pragma unroll
      for (int k = 0; k < 4; ++k) {
        const int tile = first_tile_of_part(part) + k;
        const uint64_t query = operand_descriptor(shared_ + kQ + tile * kTileBytes);
        const uint64_t key = operand_descriptor(kv_tile(buffer, tile));
#pragma unroll
        for (int kk = 0; kk < 4; ++kk) {
          constexpr int kStep = attnops::sm90::kStepKMajor;
          attnops::sm90::wgmma_n64<T>(s, query + kk * kStep, key + kk * kStep, half + k + kk > 0);
        }
      }
    }
    wait_part(buffer, kPartRope);
    const uint64_t rope = operand_descriptor(kv_tile(buffer, kRopeTile));
#pragma unroll
    for (int kk = 0; kk < 4; ++kk) {
      attnops::sm90::wgmma_n64<T>(s, q_rope_[kk], rope + kk * attnops::sm90::kStepKMajor, 1);
    }
    wgmma_commit();
  }

  __device__ void scale_scores(float (&s)[32]) const {
    if (kv_scale_ == 1.f) return;
#pragma unroll
    for (int i = 0; i < 32; ++i) s[i] *= kv_scale_;
  }

  // Gives the other group this tile's probabilities, with the maximum that they are relative to.
  __device__ void give_probabilities(int offset, const float (&s)[32], uint32_t (&a)[4][4]) {
    write_probabilities<T>(s, a, [&](int kk) { return fragment(offset, kk); });
    publish_maximum(rows_, maxima(kGroup));
    fence_async_proxy();
  }

  // o += probabilities times this group's columns of V, in flight; as fragments, or in shared memory at `offset`.
  __device__ void multiply_values(const uint32_t (&a)[4][4], int buffer, float (&o)[128]) {
    multiply_columns<T>(a, operand_descriptor(kv_tile(buffer, kGroup * 4)), o);
  }

  __device__ void multiply_values(int offset, int buffer, float (&o)[128]) {
    multiply_columns<T>(operand_descriptor(shared_ + offset), operand_descriptor(kv_tile(buffer, kGroup * 4)), o);
  }

  __device__ float* maxima(int parity) const { return reinterpret_cast<float*>(base_ + kMaxima) + parity * 64; }

  __device__ void wait_part(int buffer, int part) const {
    mbarrier_wait(shared_ + barrier_full(buffer, part), full_parity_ >> buffer & 1);
  }

  __device__ void flip_parity(int buffer) { full_parity_ ^= 1u << buffer; }

  __device__ void release(int buffer, int part) const {
    __syncwarp();
    if (lane_ == 0) attnops::sm90::mbarrier_arrive(shared_ + barrier_empty(buffer, part));
  }

  __device__ void release_queries() const {
    __syncwarp();
    if (lane_ == 0) attnops::sm90::mbarrier_arrive(shared_ + kQueriesEmpty);
  }

  const Params& p_;
  const bool out_aligned_;
  uint8_t* const base_;
  const uint32_t shared_;
  const int lane_;
  const float kv_scale_;
  RowState rows_;
  uint32_t q_rope_[4][4];
  uint32_t full_parity_ = 0;  // bit `buffer`: of the phase to wait for
};

__device__ inline void init_barriers(uint32_t shared) {
  constexpr int kWarps = kGroupThreads / 32;
  for (int buffer = 0; buffer < 2; ++buffer) {
    for (int part = 0; part < kParts; ++part) {
      attnops::sm90::mbarrier_init(shared + barrier_full(buffer, part), kLoaderWarps);
      attnops::sm90::mbarrier_init(shared + barrier_empty(buffer, part), kWarps);
    }
  }
  attnops::sm90::mbarrier_init(shared + kQueriesFull, kGroupThreads);
  attnops::sm90::mbarrier_init(shared + kQueriesEmpty, 2 * kWarps);
  attnops::sm90::mbarrier_init_fence();
}

template <typename T, Format kFormat>
__global__ void __launch_bounds__(kThreads, 1)
    mla_decode_fp8_kernel(const __grid_constant__ Params p, const bool out_aligned) {
  extern __shared__ __align__(1024) uint8_t shared_bytes[];
  const uint32_t shared = attnops::sm90::smem_address(shared_bytes);
  if (threadIdx.x == 0) init_barriers(shared);
  __syncthreads();
  attnops::sm90::launch_dependents();
  const int group = threadIdx.x / kGroupThreads;
  if (group == 0) {
    attnops::sm90::registers_increase<kConsumerRegisters>();
    Consumer<T, 0>(p, out_aligned, shared_bytes, shared).run();
  } else if (group == 1) {
    attnops::sm90::registers_increase<kConsumerRegisters>();
    Consumer<T, 1>(p, out_aligned, shared_bytes, shared).run();
  } else {
    attnops::sm90::registers_decrease<kLoaderRegisters>();
    Loader<T, kFormat>(p, shared).run();
  }
}

}  // namespace attnops::mla_decode::sm90::fp8
