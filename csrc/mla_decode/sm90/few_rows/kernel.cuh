#pragma once
#include "mla_decode/sm90/few_rows/epilogue.cuh"
#include "mla_decode/sm90/few_rows/layout.h"
#include "mla_decode/sm90/few_rows/load.cuh"
#include "mla_decode/sm90/few_rows/softmax.cuh"

// MLA decode on Hopper for few query rows per request; docs/kernels/mla_decode_few_rows.md explains the schedule.
//
// Products are transposed: keys and columns of V lie on the 64-row side of a wgmma, the queries on its narrow side, so
// nothing is padded to 64 query rows and the accumulators are small. A CTA streams its part's KV tiles of 64 keys:
//
//   both groups   S^T [64, kRows] = K Q^T, each over its half of the 576 columns
//   group 1       hands its half to group 0
//   group 0       sums, softmax, P to shared memory
//   both groups   O^T [512, kRows] += V^T P, each for its 256 columns of V
//
// Nothing overlaps inside a CTA: a tile takes less time to compute than to arrive, and the ring is refilled meanwhile.
namespace attnops::mla_decode::sm90::few_rows {

using attnops::sm90::fence_async_proxy;
using attnops::sm90::group_descriptor;
using attnops::sm90::wgmma_few;

template <typename T, class At, int kGroup>
class Consumer {
  using Scores = float[At::kGroupRows / 2];
  using Output = float[At::kColumnTiles][At::kGroupRows / 2];

 public:
  __device__ Consumer(const Params& p, bool use_boxes, uint8_t* base, uint32_t shared)
      : p_(p), use_boxes_(use_boxes), base_(base), shared_(shared) {}

  __device__ void run() {
    RequestWalk walk(p_);
    Piece piece;
    Scores s;
    Output o;
    for (int pieces = 0; walk.next(p_, piece); ++pieces) {
      rows_.begin(p_, piece);
#pragma unroll
      for (int m = 0; m < At::kColumnTiles; ++m) {
#pragma unroll
        for (float& x : o[m]) x = 0.f;
      }
      attnops::sm90::mbarrier_wait(queries_full<At>(shared_), pieces & 1);
      for (int t = 0; t < piece.num_tiles; ++t, place_ = place_.after(kLoadingWarps)) {
        multiply_queries(s, t == 0 || !is_boxed(piece, piece.first_tile + t, use_boxes_));
        if (t == piece.num_tiles - 1) release(queries_empty<At>(shared_));
        if (exchange_probabilities(piece, t, s)) rescale(o);
        multiply_values(o);
      }
      if (At::kByRows || kGroup == 0) publish_rows(rows_, base_);
      attnops::sm90::named_barrier_sync(kRowSums, kConsumerThreads);
      if (piece.partial >= 0) {
        store_partial<At>(p_, piece, base_, kGroup, o);
      } else {
        store_output<T, At>(p_, piece, base_, kGroup, o);
      }
    }
  }

 private:
  __device__ uint32_t quarter_at(int position) const { return shared_ + At::kKv + position * kQuarterBytes; }

  // Quarters of the tile before the ring's end: four, unless the rest lies at its beginning. Then the scores of the
  // ring's last and of its first four quarters are computed, and warp w takes its share from that product in which it
  // has a quarter of this tile: number (w + this) % 4.
  __device__ int quarters_before_end() const { return min_of(kLoadingWarps, At::kQuarters - place_.position); }
  __device__ int quarter_of_warp() const {
    return (threadIdx.x % kGroupThreads / 32 + quarters_before_end()) % kLoadingWarps;
  }

  // This group's rows of a K-major operand: queries or probabilities.
  __device__ uint32_t rows_at(int offset) const {
    return attnops::sm90::uniform_operand(shared_ + offset + At::first_row(kGroup) * 128);
  }

  // s = this group's scores, or their half. `written`: something of them came by ordinary writes.
  __device__ void multiply_queries(Scores& s, bool written) const {
#pragma unroll
    for (int quarter = 0; quarter < kLoadingWarps; ++quarter) {
      const RingPlace<At> place = place_.after(quarter);
      attnops::sm90::mbarrier_wait(full_barrier<At>(shared_, place.position), place.parity);
    }
    if (written) fence_async_proxy();
    const int before = quarters_before_end();
    multiply_keys(s, before < kLoadingWarps ? 0 : place_.position);
    if constexpr (At::kQuarters % kLoadingWarps != 0) {
      if (before == kLoadingWarps) return;
      Scores last;
      multiply_keys(last, At::kQuarters - kLoadingWarps);
      if (static_cast<int>(threadIdx.x % kGroupThreads / 32) >= kLoadingWarps - before) {
#pragma unroll
        for (int i = 0; i < At::kGroupRows / 2; ++i) s[i] = last[i];
      }
    }
  }

  // Scores of 64 keys from a place of the ring on.
  __device__ void multiply_keys(Scores& s, int position) const {
    const uint32_t keys = attnops::sm90::uniform_operand(quarter_at(position)), queries = rows_at(At::kQ);
    constexpr int kFirst = At::kByRows ? 0 : 18 * kGroup,
                  kEnd = At::kByRows ? 36 : kFirst + 18;  // steps of 16 columns
    attnops::sm90::wgmma_fence();
#pragma unroll
    for (int k = kFirst; k < kEnd; ++k) {
      const int step = k % 4 * attnops::sm90::kStepKMajor;
      wgmma_few<T, At::kGroupRows, 0>(s, group_descriptor<kGroupStride>(keys + (k / 4 * kPieceStride >> 4) + step),
                                      group_descriptor<1024>(queries + (k / 4 * At::kQueryPiece >> 4) + step),
                                      k > kFirst);
    }
    attnops::sm90::wgmma_commit();
    attnops::sm90::wgmma_wait<0>(s);
  }

  // From the scores to probabilities in shared memory; whether the reference maximum moved.
  __device__ bool exchange_probabilities(const Piece& piece, int t, Scores& s) {
    const int first_key = (piece.first_tile + t) * kPlanTileTokens;
    if constexpr (At::kByRows) {
      const bool moved = rows_.tile(p_, piece, first_key, quarter_of_warp(), s, base_);
      store_probabilities(s);
      attnops::sm90::named_barrier_sync(kGroup == 0 ? kGroup0 : kGroup1, kGroupThreads);
      return moved;
    }
    float4* partial = reinterpret_cast<float4*>(base_ + At::kPartial) + threadIdx.x % kGroupThreads;
    if constexpr (kGroup == 1) {
#pragma unroll
      for (int i = 0; i < At::kRows / 8; ++i) {
        partial[i * kGroupThreads] = {s[4 * i], s[4 * i + 1], s[4 * i + 2], s[4 * i + 3]};
      }
      attnops::sm90::named_barrier_arrive(kScores, kConsumerThreads);
      attnops::sm90::named_barrier_sync(kProbabilities, kConsumerThreads);
      return *reinterpret_cast<const volatile int*>(base_ + At::kMoved);
    } else {
      attnops::sm90::named_barrier_sync(kScores, kConsumerThreads);
      float4 other[At::kRows / 8];
#pragma unroll
      for (int i = 0; i < At::kRows / 8; ++i) other[i] = partial[i * kGroupThreads];
#pragma unroll
      for (int i = 0; i < At::kRows / 8; ++i) {
        s[4 * i] += other[i].x;
        s[4 * i + 1] += other[i].y;
        s[4 * i + 2] += other[i].z;
        s[4 * i + 3] += other[i].w;
      }
      const bool moved = rows_.tile(p_, piece, first_key, quarter_of_warp(), s, base_);
      store_probabilities(s);
      attnops::sm90::named_barrier_sync(kProbabilities, kConsumerThreads);
      return moved;
    }
  }

  // Rounded, with keys along the rows: row is a query, its 64 keys are dense.
  __device__ void store_probabilities(const Scores& s) const {
    const int lane = threadIdx.x % 32, chunk = 2 * quarter_of_warp() + lane / 8 % 2;
    const uint32_t place = shared_ + At::kP + At::first_row(kGroup) * 128;
    constexpr int kBlocks = At::kGroupRows / 8;
#pragma unroll
    for (int j = 0; j + 1 < kBlocks; j += 2) {
      uint32_t pairs[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) pairs[i] = attnops::sm90::pack_pair<T>(s[4 * j + 2 * i], s[4 * j + 2 * i + 1]);
      const int row = 8 * (j + lane / 16) + lane % 8;
      attnops::sm90::store_transposed(pairs, place + attnops::sm90::swizzled(row, chunk));
    }
    if constexpr (kBlocks % 2 == 1) {
      constexpr int kLast = 4 * (kBlocks - 1);
      const uint32_t pairs[2] = {attnops::sm90::pack_pair<T>(s[kLast], s[kLast + 1]),
                                 attnops::sm90::pack_pair<T>(s[kLast + 2], s[kLast + 3])};
      attnops::sm90::store_transposed(pairs, place + attnops::sm90::swizzled(8 * (kBlocks - 1) + lane % 8, chunk));
    }
    fence_async_proxy();
  }

  __device__ void rescale(Output& o) const {
    const float* factors = reinterpret_cast<const float*>(base_ + At::kFactor) + At::first_row(kGroup);
#pragma unroll
    for (int i = 0; i < At::kQueries; ++i) {
      const float factor = factors[query_of(i)];
#pragma unroll
      for (int m = 0; m < At::kColumnTiles; ++m) {
        o[m][element_of(i, 0)] *= factor;
        o[m][element_of(i, 1)] *= factor;
      }
    }
  }

  // o += columns of V times the probabilities. Each quarter of the tile is given back as soon as it is done with.
  __device__ void multiply_values(Output& o) const {
    const uint32_t probabilities = rows_at(At::kP);
    uint32_t values[kLoadingWarps];
#pragma unroll
    for (int kk = 0; kk < kLoadingWarps; ++kk) {
      values[kk] = attnops::sm90::uniform_operand(quarter_at(place_.after(kk).position) +
                                                  (At::kByRows ? 0 : 4 * kGroup * kPieceStride));
    }
    attnops::sm90::wgmma_fence();
#pragma unroll
    for (int kk = 0; kk < kLoadingWarps; ++kk) {
#pragma unroll
      for (int m = 0; m < At::kColumnTiles; ++m) {
        wgmma_few<T, At::kGroupRows, 1>(o[m], group_descriptor<kGroupStride>(values[kk] + (m * kPieceStride >> 4)),
                                        group_descriptor<1024>(probabilities + kk * attnops::sm90::kStepKMajor), 1);
      }
      attnops::sm90::wgmma_commit();
    }
    attnops::sm90::wgmma_wait<3>();
    release_quarter(0);
    attnops::sm90::wgmma_wait<2>();
    release_quarter(1);
    attnops::sm90::wgmma_wait<1>();
    release_quarter(2);
    if constexpr (At::kByRows) {
      attnops::sm90::wgmma_wait<0>(o[0], o[1], o[2], o[3], o[4], o[5], o[6], o[7]);
    } else {
      attnops::sm90::wgmma_wait<0>(o[0], o[1], o[2], o[3]);
    }
    release_quarter(3);
  }

  __device__ void release_quarter(int quarter) const {
    release(empty_barrier<At>(shared_, place_.after(quarter).position));
  }

  __device__ static void release(uint32_t barrier) {
    if (threadIdx.x % 32 == 0) attnops::sm90::mbarrier_arrive(barrier);
  }

  const Params& p_;
  const bool use_boxes_;
  uint8_t* const base_;
  const uint32_t shared_;
  Softmax<At, kGroup> rows_;
  RingPlace<At> place_{0, 0};  // of the tile's first quarter
};

template <class At>
__device__ inline void init_barriers(uint32_t shared) {
  for (int position = 0; position < At::kQuarters; ++position) {
    attnops::sm90::mbarrier_init(full_barrier<At>(shared, position), 32);
    attnops::sm90::mbarrier_init(empty_barrier<At>(shared, position), kConsumerThreads / 32);
  }
  attnops::sm90::mbarrier_init(queries_full<At>(shared), 32 * kLoadingWarps);
  attnops::sm90::mbarrier_init(queries_empty<At>(shared), kConsumerThreads / 32);
  attnops::sm90::mbarrier_init_fence();
}

template <typename T, class At>
__global__ void __launch_bounds__(kThreads, 1)
    mla_decode_few_kernel(const __grid_constant__ Params p, const __grid_constant__ CUtensorMap map,
                          const __grid_constant__ Modes modes) {
  extern __shared__ __align__(1024) uint8_t shared_bytes[];
  const uint32_t shared = attnops::sm90::smem_address(shared_bytes);
  if (threadIdx.x == 0) {
    init_barriers<At>(shared);
    if (modes.use_boxes) attnops::sm90::prefetch_map(&map);
  }
  __syncthreads();
  // In this order: what depends on this kernel may read the plan, which is whole once this kernel may.
  attnops::sm90::wait_for_prerequisites();
  attnops::sm90::launch_dependents();
  const int group = threadIdx.x / kGroupThreads;
  if (group == 0) {
    if constexpr (At::kByRows) attnops::sm90::registers_increase<208>();
    Consumer<T, At, 0>(p, modes.use_boxes, shared_bytes, shared).run();
  } else if (group == 1) {
    if constexpr (At::kByRows) attnops::sm90::registers_increase<208>();
    Consumer<T, At, 1>(p, modes.use_boxes, shared_bytes, shared).run();
  } else {
    if constexpr (At::kByRows) attnops::sm90::registers_decrease<80>();
    Loader<At>(p, &map, modes, shared).run();
  }
}

}  // namespace attnops::mla_decode::sm90::few_rows
