#pragma once
#include "device/sm90/cluster.cuh"
#include "mla_decode/sm90/few_rows/epilogue.cuh"
#include "mla_decode/sm90/few_rows/exchange.cuh"
#include "mla_decode/sm90/few_rows/finish.cuh"
#include "mla_decode/sm90/few_rows/layout.h"
#include "mla_decode/sm90/few_rows/load.cuh"
#include "mla_decode/sm90/few_rows/softmax.cuh"

// MLA decode on Hopper for few query rows per request; docs/kernels/mla_decode_few_rows.md explains the schedule.
//
// Products are transposed: keys and columns of V lie on the 64-row side of a wgmma, the queries on its narrow side, so
// nothing is padded to 64 query rows and the accumulators are small. A CTA streams its part's KV tiles of 64 keys:
//
//   S^T [64, kRows] = K Q^T, each group over its half of the 576 columns
//   the groups exchange scores, so that each has half of the rows whole; softmax, P to shared memory
//   O^T [512, kRows] += V^T P, each group for its 256 columns of V
//
// Nothing overlaps inside a CTA: a tile takes less time to compute than to arrive, and the ring is refilled meanwhile.
namespace attnops::mla_decode::sm90::few_rows {

using attnops::sm90::fence_async_proxy;
using attnops::sm90::group_descriptor;
using attnops::sm90::wgmma_few;

template <typename T, class At>
class Consumer {
  static constexpr int kColumnTiles = 4;  // of 64 columns of V
  using Scores = float[At::kRows / 2];
  using SoftmaxScores = typename Softmax<At>::Scores;
  using Output = float[kColumnTiles][At::kRows / 2];

 public:
  __device__ Consumer(const Params& p, const CallModes& modes, uint8_t* base, uint32_t shared, int group)
      : p_(p), modes_(modes), base_(base), shared_(shared), group_(group), rows_(group) {}

  __device__ void run() {
    RequestWalkFor<At::kOptions> walk;
    RequestPiece piece;
    Scores s;
    Output o;
    int asked = guess_request();  // whose queries are there or on their way
    attnops::sm90::wait_for_prerequisites();
    walk.begin(p_);
    const bool pairs = modes_.paired && shares_with_peer(entry_of(p_, blockIdx.x & ~1u), entry_of(p_, blockIdx.x | 1));
    if (asked >= 0) load_queries(asked);  // before the first tiles come, behind which they would have to wait
    while (walk.next(p_, piece)) {
      if (asked != piece.request) {
        attnops::sm90::wait_for_copies();
        load_queries(piece.request);
      }
      rows_.begin(p_, piece);
#pragma unroll
      for (int m = 0; m < kColumnTiles; ++m) {
#pragma unroll
        for (float& x : o[m]) x = 0.f;
      }
      await_queries();
      const bool exchanges = pairs && piece.is_last;
      for (int t = 0; t < piece.num_tiles; ++t, ++count_) {
        multiply_queries(s, At::kSelects || !is_boxed(p_, piece, piece.first_tile + t, modes_.use_boxes));
        rescale(o, exchange_probabilities(piece, t, s));
        if (exchanges && t == piece.num_tiles - 1 && threadIdx.x == 0) Exchange<At>(shared_).let_peer_send();
        multiply_values(o);
      }
      asked = walk.upcoming(p_);
      if (asked >= 0) load_queries(asked);  // they travel while this piece is finished
      const RowOutput<T> output{p_, piece.request, piece.num_rows};
      Finish<T, At>(output, piece, group_, base_, shared_, exchanges).run(o);
    }
  }

 private:
  static constexpr int kElement = 2;

  // The request that the part will probably begin with, before the kernels ahead have ended.
  __device__ int guess_request() const {
    if (At::kSelects && p_.tile_scheduler_metadata == nullptr) return -1;
    const int request = attnops::sm90::load_guess(p_.tile_scheduler_metadata + blockIdx.x * kSplitKvEntrySize);
    return request >= 0 && request < p_.batch_size ? request : -1;
  }

  // Rows beyond the last become zeros. Every thread has a row, of which it copies every so many 16 bytes.
  __device__ void load_queries(int request) const {
    constexpr int kLanes = kConsumerThreads / (At::kRows <= 16 ? 16 : At::kRows <= 32 ? 32 : 64);  // for a row
    const int row = threadIdx.x / kLanes, lane = threadIdx.x % kLanes;
    if (row >= At::kRows) return;
    const bool valid = row < p_.seqlen_q * p_.num_q_heads;
    const RowPlace at = row_place(p_, valid ? row : 0);
    const uint8_t* q =
        static_cast<const uint8_t*>(p_.q) +
        kElement * (request * p_.q_stride_request + at.token * p_.q_stride_token + at.head * p_.q_stride_head);
    const uint8_t* rope = q + kPiecesV * 128;
    if (p_.q_pe) {
      rope = static_cast<const uint8_t*>(p_.q_pe) +
             kElement *
                 (request * p_.q_pe_stride_request + at.token * p_.q_pe_stride_token + at.head * p_.q_pe_stride_head);
    }
    const bool has_rope = valid && !(At::kSelects && p_.shared_rows);
    const uint32_t target = shared_ + At::kQ;
#pragma unroll
    for (int first = 0; first < 8 * kPieces; first += kLanes) {
      const int chunk = first + lane;  // of 16 bytes
      if (chunk >= 8 * kPieces) break;
      attnops::sm90::copy16(target + chunk / 8 * At::kQueryPiece + attnops::sm90::swizzled(row, chunk % 8),
                            first < 8 * kPiecesV ? q + chunk * 16 : rope + (chunk - 8 * kPiecesV) * 16,
                            first < 8 * kPiecesV ? valid : has_rope);
    }
  }

  __device__ void await_queries() const {
    attnops::sm90::wait_for_copies();
    fence_async_proxy();
    attnops::sm90::named_barrier_sync(kQueries, kConsumerThreads);
  }

  __device__ uint32_t quarter(int number) const {
    return shared_ + At::kKv + ring_place(count_, number).position * kQuarterBytes;
  }

  // s = this group's half of the scores. `written`: something of the operands came by ordinary writes.
  __device__ void multiply_queries(Scores& s, bool written) const {
#pragma unroll
    for (int number = 0; number < kLoadingWarps; ++number) {
      const RingPlace place = ring_place(count_, number);
      attnops::sm90::mbarrier_wait(full_barrier<At>(shared_, place.position), place.parity);
    }
    if (written) fence_async_proxy();
    // 256 columns of the latent and 32 of the rope's 64.
    constexpr int kLatentSteps = 16, kRopeSteps = 2;
    const uint32_t keys = attnops::sm90::uniform_operand(quarter(0) + group_ * 4 * kPieceStride);
    const uint32_t queries = attnops::sm90::uniform_operand(shared_ + At::kQ + group_ * 4 * At::kQueryPiece);
    const uint32_t rope_keys =
        attnops::sm90::uniform_operand(quarter(0) + kPiecesV * kPieceStride + group_ * kRopeSteps * 32);
    const uint32_t rope_queries =
        attnops::sm90::uniform_operand(shared_ + At::kQ + kPiecesV * At::kQueryPiece + group_ * kRopeSteps * 32);
    attnops::sm90::wgmma_fence();
#pragma unroll
    for (int i = 0; i < kLatentSteps; ++i) {
      const int step = i % 4 * attnops::sm90::kStepKMajor;
      wgmma_few<T, At::kRows, 0>(s, group_descriptor<kGroupStride>(keys + (i / 4 * kPieceStride >> 4) + step),
                                 group_descriptor<1024>(queries + (i / 4 * At::kQueryPiece >> 4) + step), i > 0);
    }
#pragma unroll
    for (int i = 0; i < kRopeSteps; ++i) {
      const int step = i * attnops::sm90::kStepKMajor;
      wgmma_few<T, At::kRows, 0>(s, group_descriptor<kGroupStride>(rope_keys + step),
                                 group_descriptor<1024>(rope_queries + step), 1);
    }
    attnops::sm90::wgmma_commit();
    attnops::sm90::wgmma_wait<0>(s);
  }

  // Whether the reference maximum of a row moved, in either half of the rows.
  struct Moved {
    bool first, second;
  };

  // From the halves of the scores to probabilities in shared memory.
  __device__ Moved exchange_probabilities(const Piece& piece, int t, const Scores& s) {
    SoftmaxScores own;
    exchange_scores(s, own);
    rows_.tile(p_, piece, (piece.first_tile + t) * kPlanTileTokens, own, listed_keys(), base_, shared_);
    if (t == piece.num_tiles - 1) publish_rows(rows_, base_);
    store_probabilities(own);
    attnops::sm90::named_barrier_sync(kProbabilities, kConsumerThreads);
    const volatile int* moved = reinterpret_cast<const volatile int*>(base_ + At::kMoved);
    return {moved[0] != 0, moved[1] != 0};
  }

  // Of lists: which of the thread's two keys there are. Lane 0 reads for its warp, for it gives the tile back as well:
  // compute-sanitizer's racecheck goes by threads.
  __device__ uint32_t listed_keys() const {
    if constexpr (!At::kSelects) return 3;
    const int warp = threadIdx.x % kGroupThreads / 32, lane = threadIdx.x % 32;
    uint32_t keys = 0;
    if (lane == 0) {
      const auto* listed = reinterpret_cast<const volatile uint16_t*>(base_ + At::kListed);
      keys = listed[ring_place(count_, warp).position];
    }
    keys = __shfl_sync(0xffffffffu, keys, 0) >> lane / 4;
    return (keys & 1) | (keys >> 7 & 2);
  }

  // Gives the other group its half of the rows, and completes the own half.
  __device__ void exchange_scores(const Scores& s, SoftmaxScores& own) const {
    exchange_halves<At>(reinterpret_cast<float4*>(base_ + At::kPartial), group_, s, own,
                        [] { attnops::sm90::named_barrier_sync(kScores, kConsumerThreads); });
  }

  // Rounded, with keys along the rows: row is a query, its 64 keys are dense.
  __device__ void store_probabilities(const SoftmaxScores& s) const {
    const int lane = threadIdx.x % 32, warp = threadIdx.x % kGroupThreads / 32;
    const int chunk = 2 * warp + lane / 8 % 2;
    const uint32_t place = shared_ + At::kP + At::first_softmax_row(group_) * 128;
    constexpr int kBlocks = At::kSoftmaxRows / 8;
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

  __device__ void rescale(Output& o, const Moved& moved) const {
    if (moved.first) rescale_queries<0, At::kQueries / 2>(o);
    if (moved.second) rescale_queries<At::kQueries / 2, At::kQueries>(o);
  }

  template <int kBegin, int kEnd>
  __device__ void rescale_queries(Output& o) const {
    const float* factors = reinterpret_cast<const float*>(base_ + At::kFactor);
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

  // o += columns of V times the probabilities. Each quarter of the tile is given back as soon as it is done with.
  __device__ void multiply_values(Output& o) const {
    const uint32_t probabilities = attnops::sm90::uniform_operand(shared_ + At::kP);
    const uint32_t values = attnops::sm90::uniform_operand(quarter(0) + kColumnTiles * group_ * kPieceStride);
    attnops::sm90::wgmma_fence();
#pragma unroll
    for (int kk = 0; kk < kLoadingWarps; ++kk) {
#pragma unroll
      for (int m = 0; m < kColumnTiles; ++m) {
        wgmma_few<T, At::kRows, 1>(
            o[m], group_descriptor<kGroupStride>(values + ((m * kPieceStride + kk * kQuarterBytes) >> 4)),
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
    attnops::sm90::wgmma_wait<0>(o[0], o[1], o[2], o[3]);
    release_quarter(3);
  }

  __device__ void release_quarter(int number) const {
    release(empty_barrier<At>(shared_, ring_place(count_, number).position));
  }

  __device__ static void release(uint32_t barrier) {
    if (threadIdx.x % 32 == 0) attnops::sm90::mbarrier_arrive(barrier);
  }

  const Params& p_;
  const CallModes& modes_;
  uint8_t* const base_;
  const uint32_t shared_;
  const int group_;
  Softmax<At> rows_;
  int count_ = 0;  // tiles of the ring so far
};

template <class At>
__device__ inline void init_barriers(uint32_t shared) {
  for (int position = 0; position < kQuarters; ++position) {
    attnops::sm90::mbarrier_init(full_barrier<At>(shared, position), kFullArrivals<At>);
    attnops::sm90::mbarrier_init(empty_barrier<At>(shared, position), kConsumerThreads / 32);
  }
  for (int group = 0; group < 2; ++group)
    attnops::sm90::mbarrier_init(shared + At::kMoveBarriers + 8 * group, kGroupThreads);
  Exchange<At>(shared).init();
  attnops::sm90::mbarrier_init_fence();
}

template <typename T, class At>
__global__ void __launch_bounds__(kThreads, 1)
    mla_decode_few_kernel(const __grid_constant__ Params p, const __grid_constant__ CUtensorMap map,
                          const __grid_constant__ CallModes modes) {
  extern __shared__ __align__(1024) uint8_t shared_bytes[];
  const uint32_t shared = attnops::sm90::smem_address(shared_bytes);
  if (threadIdx.x == 0) {
    init_barriers<At>(shared);
    if (modes.use_boxes) attnops::sm90::prefetch_map(&map);
  }
  __syncwarp();
  attnops::sm90::cluster_arrive();
  attnops::sm90::cluster_wait();
  attnops::sm90::launch_dependents();
  const int group = __shfl_sync(0xffffffffu, threadIdx.x / kGroupThreads, 0);
  constexpr bool kMoveRegisters = At::kRows > 16;
  if (group < 2) {
    if constexpr (kMoveRegisters) attnops::sm90::registers_increase<208>();
    Consumer<T, At>(p, modes, shared_bytes, shared, group).run();
  } else {
    if constexpr (kMoveRegisters) attnops::sm90::registers_decrease<88>();
    Loader<At> loader(p, &map, modes, shared_bytes, shared);
    loader.guess();
    attnops::sm90::wait_for_prerequisites();
    loader.confirm();
    loader.run();
  }
}

}  // namespace attnops::mla_decode::sm90::few_rows
