#pragma once
#include "mla_decode/sm90/layout.h"
#include "mla_decode/sm90/load.cuh"
#include "mla_decode/sm90/results.cuh"
#include "mla_decode/sm90/softmax.cuh"
#include "mla_decode/sm90/tile_products.cuh"

// MLA decode on Hopper; docs/kernels/mla_decode_sm90.md explains the schedule.
//
// A CTA takes one part of the plan: pieces of 64 query rows against runs of KV tiles of 64 keys. Two warpgroups share
// the 64 x 512 accumulator, group 0 has columns 0 .. 255, group 1 the others. Group 0 computes the scores and
// probabilities of even tiles, group 1 those of odd tiles, each hands them to the other through shared memory, and both
// apply them to their own columns in the order of the tiles. While one group is in its softmax, the matrix units have
// the other's products: group 0's softmax lies under the scores of the odd tile, group 1's under the even tile's
// products with V.
namespace attnops::mla_decode::sm90 {

using attnops::sm90::fence_async_proxy;
using attnops::sm90::operand_descriptor;
using attnops::sm90::wgmma_commit;
using attnops::sm90::wgmma_fence;
using attnops::sm90::wgmma_wait;

template <typename T, int kGroup, Options kOptions>
class Consumer {
 public:
  __device__ Consumer(const Params& p, const Maps& maps, const Modes& modes, uint8_t* base, uint32_t shared)
      : p_(p), maps_(maps), modes_(modes), base_(base), shared_(shared), lane_(threadIdx.x % 32) {}

  __device__ void run() {
    PieceWalkFor<kOptions> walk(*reinterpret_cast<const SplitKvEntry*>(base_ + kEntry));
    Piece piece;
    float s[32], o[128];
    for (int count = 0; walk.next(p_, piece, [] { return kPassesKeyless<kOptions>; }); ++count) {
      // Both groups stage their rows in the place of P0.
      if (count > 0) {
        if (kGroup == 0) {
          mbarrier_wait(shared_ + kRowsStored, (count & 1) ^ 1);
        } else {
          attnops::sm90::mbarrier_arrive(shared_ + kRowsStored);
        }
      }
      // Group 0 lets its first scores go ahead, unless they are in that place.
      if (kGroup == 1 || stored_ == 0) finish_store();
      rows_.begin<kOptions>(p_, piece);
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
      if (!kListed && piece.num_tiles % 2 == 0) release(kQueriesEmpty);
      if (kListed) release(kQueriesRopeEmpty);
      if constexpr (selects(kOptions) && kGroup == 1) give_tops(count & 1);
      const RowSums sums =
          exchange_sums(rows_, reinterpret_cast<float*>(base_ + kSums), shared_ + kRowSums, count & 1, kGroup);
      if constexpr (selects(kOptions) && kGroup == 0) store_tops(piece, count & 1);
      store(piece, sums, o);
    }
    finish_store();
  }

 private:
  static constexpr bool kListed = kOptions == Options::kSelected;
  static constexpr int kPart = kGroup == 0 ? kPartLeft : kPartRight;  // of a tile: the group's values

  // Whether a piece's rows leave through the place of the group's values of its last tile, given back after that.
  __device__ bool stores_by_map(const Piece& piece) const { return kListed && modes_.out_by_map && piece.partial < 0; }
  __device__ bool keeps_place(const Piece& piece, int t) const {
    return kListed && t + 1 == piece.num_tiles && stores_by_map(piece);
  }

  __device__ void store(const Piece& piece, const RowSums& sums, float (&o)[128]) {
    if constexpr (kListed) {
      if (stores_by_map(piece)) {
        stored_ = (piece.num_tiles - 1) % 2;
        const int place = kKv + stored_ * kOperandBytes + kGroup * 4 * kTileBytes;
        const auto address = [&](int k, int kk) { return fragment(place + k * kTileBytes, kk); };
        store_rows_by_map<T>(p_, &maps_.kv, piece, rows_, sums, kGroup, shared_ + place, address, o);
        return;
      }
    }
    store_rows<T, kOptions>(p_, piece, rows_, sums, kGroup, modes_.out_aligned, base_ + kP0, shared_ + kP0, o);
  }

  // Gives the place back that rows have left through.
  __device__ void finish_store() {
    if (!kListed || stored_ < 0) return;
    if (lane_ == 0) attnops::sm90::wait_for_reads();
    __syncwarp();
    release(stored_, kPart);
    stored_ = -1;
  }

  // The steps take a pair of tiles, t and t + 1.

  // Group 0: scores and softmax of tile t, its product, then that of tile t + 1 with the other group's probabilities.
  __device__ void step_even(const Piece& piece, int t, float (&s)[32], float (&o)[128]) {
    const int tile = piece.first_tile + t;
    multiply_rope(0, s);
    multiply_queries(0, s);
    const bool has_odd = t + 1 < piece.num_tiles;
    if (has_odd) attnops::sm90::named_barrier_arrive(kScores0, kConsumerThreads);
    finish_store();
    wgmma_wait<0>(s);
    release(0, kPartRope);
    if (kListed ? t + 2 >= piece.num_tiles : !has_odd) {
      release(kQueriesEmpty);  // ahead of the products, for the next piece
    }

    float factor[kRowsPerThread];
    if constexpr (selects(kOptions)) {
      float top[kRowsPerThread];
      const float scale = listed_tops(p_, listed_keys(0), s, top);
      listed_exponentials(rows_, scale, top, s, factor, [] {});
    } else {
      softmax_tile<kOptions>(p_, piece, rows_, tile * kPlanTileTokens, s, factor, [] {});
    }
    uint32_t a[4][4];
    give_probabilities(kP0, s, a);
    attnops::sm90::named_barrier_arrive(kProbabilities0, kConsumerThreads);
    rescale(o, factor);
    clear_tail(piece, tile, 0);
    multiply_values(a, 0, o);
    flip_parity(0);
    wgmma_wait<0>(o);
    if (!keeps_place(piece, t)) release(0, kPart);
    if (has_odd) {
      multiply_odd(piece, tile + 1, o);
      wgmma_wait<0>(o);
      if (!keeps_place(piece, t + 1)) release(1, kPart);
    }
  }

  // Group 0: the product of an odd tile with the other group's probabilities, in flight.
  __device__ void multiply_odd(const Piece& piece, int tile, float (&o)[128]) {
    float factor[kRowsPerThread];
    mbarrier_wait(shared_ + kProbabilities1, full_parity_ >> 1);
    follow_maximum(rows_, maxima(1), factor);
    rescale(o, factor);
    wait_part(1, kPartLeft);
    clear_tail(piece, tile, 1);
    multiply_values(kP1, 1, o);
    flip_parity(1);
  }

  // Group 1: scores of tile t + 1; the product of tile t with the other group's probabilities, and under it the
  // softmax of tile t + 1; then its product.
  __device__ void step_odd(const Piece& piece, int t, float (&s)[32], float (&o)[128]) {
    const int tile = piece.first_tile + t;
    const bool has_odd = t + 1 < piece.num_tiles;
    if (has_odd) {
      // Scores of both tiles at once would finish together, and leave the matrix units idle under both softmaxes.
      attnops::sm90::named_barrier_sync(kScores0, kConsumerThreads);
      multiply_rope(1, s);
      multiply_queries(1, s);
      wgmma_wait<0>(s);
      release(1, kPartRope);
      if (kListed && t + 2 >= piece.num_tiles) release(kQueriesEmpty);
    } else {
      release(kQueriesEmpty);
    }

    float factor[kRowsPerThread];
    float top[kRowsPerThread], scale = 1.f;
    if constexpr (selects(kOptions)) {
      if (has_odd) scale = listed_tops(p_, listed_keys(1), s, top);  // while group 0 is in its softmax
    }
    attnops::sm90::named_barrier_sync(kProbabilities0, kConsumerThreads);
    follow_maximum(rows_, maxima(0), factor);
    rescale(o, factor);
    const auto multiply_even = [&] {
      wait_part(0, kPart);
      clear_tail(piece, tile, 0);
      multiply_values(kP0, 0, o);
      flip_parity(0);
    };
    if (!selects(kOptions) || !has_odd) multiply_even();
    if (!has_odd) {
      wgmma_wait<0>(o);
      if (!keeps_place(piece, t)) release(0, kPart);
      return;
    }

    const auto give_back = [&] {
      wgmma_wait<0>(o);
      release(0, kPart);
    };
    float odd_factor[kRowsPerThread];
    if constexpr (selects(kOptions)) {
      // The product of tile t begins between the exponentials: before that the matrix units are busy with group 0's,
      // and this group would do nothing but wait for them.
      listed_exponentials(rows_, scale, top, s, odd_factor, multiply_even);
    } else {
      softmax_tile<kOptions>(p_, piece, rows_, (tile + 1) * kPlanTileTokens, s, odd_factor, give_back);
    }
    uint32_t a[4][4];
    give_probabilities(kP1, s, a);
    attnops::sm90::mbarrier_arrive(shared_ + kProbabilities1);
    if constexpr (selects(kOptions)) give_back();
    rescale(o, odd_factor);
    clear_tail(piece, tile + 1, 1);
    multiply_values(a, 1, o);
    flip_parity(1);
    wgmma_wait<0>(o);
    if (!keeps_place(piece, t + 1)) release(1, kPart);
  }

  // Common calls bring a request's last tile whole: zeros for this group's values behind the keys, for 0 x NaN must not
  // happen. Its scores have been computed.
  __device__ void clear_tail(const Piece& piece, int tile, int buffer) const {
    const int keys = piece.keys.end - tile * kPlanTileTokens;
    if (kOptions != Options::kCommon || keys >= kPlanTileTokens) return;
    uint8_t* values = base_ + kKv + buffer * kOperandBytes + kGroup * 4 * kTileBytes;
#pragma unroll 1
    for (int i = max_of(keys, 0) * 8 + threadIdx.x % kGroupThreads; i < kPlanTileTokens * 8; i += kGroupThreads) {
#pragma unroll
      for (int k = 0; k < 4; ++k) *reinterpret_cast<uint4*>(values + k * kTileBytes + i * 16) = {};
    }
    fence_async_proxy();
    attnops::sm90::mbarrier_meet(shared_ + barrier_cleared(kGroup));
  }

  // The largest score of each row of a piece: group 1 leaves what its tiles have before the groups meet, group 0 stores
  // it. By one of the four lanes that have a row.
  __device__ float* tops(int parity) const {
    return reinterpret_cast<float*>(base_ + kTops) + parity * 64 + threadIdx.x % kGroupThreads / 32 * 16 + lane_ / 4;
  }

  __device__ void give_tops(int parity) const {
    if (lane_ % 4 != 0) return;
#pragma unroll
    for (int h = 0; h < kRowsPerThread; ++h) tops(parity)[8 * h] = rows_.top[h];
  }

  __device__ void store_tops(const Piece& piece, int parity) const {
    if (p_.max_logits == nullptr || lane_ % 4 != 0) return;
#pragma unroll
    for (int h = 0; h < kRowsPerThread; ++h) {
      const int row = threadIdx.x % kGroupThreads / 32 * 16 + lane_ / 4 + 8 * h;
      if (row >= piece.num_rows) continue;
      const float top = fmaxf(rows_.top[h], tops(parity)[8 * h]);
      p_.max_logits[static_cast<int64_t>(piece.request) * p_.num_q_heads + piece.first_row + row] = top * kLn2;
    }
  }

  // Of a list, which keys of the buffer's tile there are: as its loaders have left it.
  __device__ auto listed_keys(int buffer) const {
    if constexpr (kOptions == Options::kMasked) {
      RowKeys seen;
      const auto* words = reinterpret_cast<const volatile uint64_t*>(base_ + kHeadMasks) + buffer * kMostHeadGroups;
#pragma unroll
      for (int h = 0; h < kRowsPerThread; ++h) seen.of[h] = words[rows_.group[h]];
      return seen;
    } else {
      if constexpr (kOptions != Options::kSelected) return uint64_t{0};
      return static_cast<uint64_t>(*reinterpret_cast<const volatile uint64_t*>(base_ + kKeyMasks + 8 * buffer));
    }
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

  // s = the rope part of the scores, in flight.
  __device__ void multiply_rope(int buffer, float (&s)[32]) {
    wait_unit(buffer, kRope);
    const uint64_t key = operand_descriptor(kv_tile(buffer, kRopeTile));
    wgmma_fence();
#pragma unroll
    for (int kk = 0; kk < 4; ++kk) {
      attnops::sm90::wgmma_n64<T>(s, q_rope_[kk], key + kk * attnops::sm90::kStepKMajor, kk > 0);
    }
  }

  // s += the rest of the scores, the half first that comes first, in flight.
  __device__ void multiply_queries(int buffer, float (&s)[32]) {
#pragma unroll
    for (int u = 0; u < 4; ++u) {
      const int unit = (kGroup == 0 ? u : (u + 2) % 4) + 1;
      wait_unit(buffer, unit);
#pragma unroll
      for (int k = 0; k < 2; ++k) {
        const int tile = 2 * (unit - 1) + k;
        const uint64_t query = operand_descriptor(shared_ + kQ + tile * kTileBytes);
        const uint64_t key = operand_descriptor(kv_tile(buffer, tile));
#pragma unroll
        for (int kk = 0; kk < 4; ++kk) {
          constexpr int kStep = attnops::sm90::kStepKMajor;
          attnops::sm90::wgmma_n64<T>(s, query + kk * kStep, key + kk * kStep, 1);
        }
      }
    }
    wgmma_commit();
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

  __device__ void wait_unit(int buffer, int unit) const {
    mbarrier_wait(shared_ + barrier_full(buffer, unit), full_parity_ >> buffer & 1);
  }

  // For a tile whose scores the other group computed: it has arrived, but this group has not seen it yet.
  __device__ void wait_part(int buffer, int part) const {
    wait_unit(buffer, 2 * part - 1);
    wait_unit(buffer, 2 * part);
  }

  __device__ void flip_parity(int buffer) { full_parity_ ^= 1u << buffer; }

  __device__ void release(int buffer, int part) const { release(barrier_empty(buffer, part)); }

  __device__ void release(int barrier) const { attnops::sm90::mbarrier_arrive(shared_ + barrier); }

  const Params& p_;
  const Maps& maps_;
  const Modes& modes_;
  uint8_t* const base_;
  const uint32_t shared_;
  const int lane_;
  RowState rows_;
  uint32_t q_rope_[4][4];
  uint32_t full_parity_ = 0;  // bit of the buffer: the phase to wait for
  int stored_ = -1;           // the buffer that a piece's rows are leaving through
};

// By one thread: a barrier for each lane becomes a loop over the lanes, of a thousand cycles.
template <Options kOptions>
__device__ inline void init_barriers(uint32_t shared, bool queries_by_map) {
#pragma unroll
  for (int i = 0; i < kBarrierCount; ++i) {
    const int at = kBarriers + 8 * i;
    int arrivals = kGroupThreads;
    if (at < barrier_empty(0, 0)) arrivals = kFullArrivals;
    if (at == kQueriesFull && queries_by_map) arrivals = 1;
    if (at == kQueriesEmpty || at == kRowSums) arrivals = kConsumerThreads;
    attnops::sm90::mbarrier_init(shared + at, arrivals);
  }
  if constexpr (kOptions == Options::kSelected) {
    attnops::sm90::mbarrier_init(shared + kQueriesRopeEmpty, kConsumerThreads);
  }
  attnops::sm90::mbarrier_init_fence();
}

// What one warp does before all others begin: the barriers, without waiting for the kernels ahead, then the part's row
// of the plan.
template <Options kOptions>
__device__ inline void start(const Params& p, const Maps& maps, const Modes& modes, uint8_t* base, uint32_t shared) {
  const int lane = threadIdx.x % 32;
  if (lane == 0) {
    if (modes.use_boxes) attnops::sm90::prefetch_map(&maps.kv);
    if (modes.queries_by_map) attnops::sm90::prefetch_map(&maps.q);
    init_barriers<kOptions>(shared, modes.queries_by_map);
  }
  __syncwarp();
  attnops::sm90::wait_for_prerequisites();
  const SplitKvEntry entry = entry_for<kOptions>(p, blockIdx.x);
  if (lane == 0) *reinterpret_cast<SplitKvEntry*>(base + kEntry) = entry;
}

template <typename T, Options kOptions, Loads kLoads>
__global__ void __launch_bounds__(kThreads, 1)
    mla_decode_kernel(const __grid_constant__ Params p, const __grid_constant__ Maps maps,
                      const __grid_constant__ Modes modes) {
  extern __shared__ __align__(1024) uint8_t shared_bytes[];
  const uint32_t shared = attnops::sm90::smem_address(shared_bytes);
  if (threadIdx.x / 32 == kConsumerThreads / 32) {
    start<kOptions>(p, maps, modes, shared_bytes, shared);
  } else {
    attnops::sm90::wait_for_prerequisites();
  }
  __syncthreads();
  attnops::sm90::launch_dependents();
  const int group = threadIdx.x / kGroupThreads;
  if (group == 0) {
    attnops::sm90::registers_increase<224>();
    Consumer<T, 0, kOptions>(p, maps, modes, shared_bytes, shared).run();
  } else if (group == 1) {
    attnops::sm90::registers_increase<224>();
    Consumer<T, 1, kOptions>(p, maps, modes, shared_bytes, shared).run();
  } else {
    attnops::sm90::registers_decrease<56>();
    Loader<kOptions, kLoads>(p, maps, modes, *reinterpret_cast<const SplitKvEntry*>(shared_bytes + kEntry),
                             shared_bytes, shared)
        .run();
  }
}

}  // namespace attnops::mla_decode::sm90
