#pragma once
#include "device/sm90/wgmma_few.cuh"
#include "device/sm90/wgmma_fp8.cuh"
#include "mla_decode/sm90/fp8_products/epilogue.cuh"
#include "mla_decode/sm90/fp8_products/layout.h"
#include "mla_decode/sm90/fp8_products/load.cuh"
#include "mla_decode/sm90/fp8_products/queries.cuh"
#include "mla_decode/sm90/fp8_products/softmax.cuh"

// MLA decode over dense e4m3 caches on the e4m3 units; docs/kernels/mla_decode_fp8.md.
//
// Two warpgroups share the 64 x 512 output by columns. Group 0 computes scores and probabilities of even tiles, group 1
// those of odd ones, and both multiply both with their own columns of V. A group starts the scores of its next tile
// before those products, so that they are there when it comes to the next softmax. The output is computed transposed,
// as V^T P^T: V^T comes from shared memory by transposing loads and two byte permutations a register, which no other
// layout of a one-byte operand allows. The units keep 13 bits of a sum, which the rounding of q and P hides.
namespace attnops::mla_decode::sm90::fp8_products {

using attnops::sm90::fence_async_proxy;
using attnops::sm90::group_descriptor;
using attnops::sm90::half_row_descriptor;
using attnops::sm90::named_barrier_sync;
using attnops::sm90::uniform_operand;
using attnops::sm90::wgmma_commit;
using attnops::sm90::wgmma_e4m3;
using attnops::sm90::wgmma_fence;
using attnops::sm90::wgmma_wait;

template <typename T, Options kOptions>
class Consumer {
  using L = Layout;
  using Scores = float[32];

 public:
  __device__ Consumer(const Params& p, const Modes& modes, int group, uint8_t* base, uint32_t shared)
      : p_(p),
        modes_(modes),
        base_(base),
        shared_(shared),
        group_(group),
        lane_(threadIdx.x % 32),
        warp_(threadIdx.x % kGroupThreads / 32),
        kv_scale_(p.kv_scale ? *p.kv_scale : 1.f) {}

  // Both groups run the same code: the loop is then small enough for the instruction cache.
  __device__ void run() {
    PieceWalkFor<kOptions> walk(*reinterpret_cast<const SplitKvEntry*>(base_ + L::kEntry));
    Piece piece;
    Scores s;
    TransposedOutput o;
    while (walk.next(p_, piece)) {
      // The barrier at the end of the piece before stands between its scores and these queries.
      take_queries();
      named_barrier_sync(kConsumers, kConsumerThreads);
      rows_.template begin<kOptions>(p_, piece);
      begin_piece(piece);
#pragma unroll
      for (int i = 0; i < 128; ++i) o[i / 32][i % 32] = 0.f;
      begin_scores(group_, group_, s);
      wgmma_wait<0>(s);
#pragma unroll 1
      for (int t = 0; t < tiles_; t += 2) {
        give_probabilities(piece, t, s);
        const int count = min_of(tiles_ - t, 2);
#pragma unroll 1
        for (int parity = 0; parity < count; ++parity) {
          multiply_values(t + parity, parity, s, o);
        }
        pair_ ^= 1;
      }
      finish_piece<T, kOptions>(p_, piece, rows_, base_, group_, kv_scale_, modes_.out_aligned, o);
    }
  }

 private:
  // The first two stages of a piece.
  __device__ void take_queries() {
    const int first = stage_, second = stage_after(1);
    mbarrier_wait(shared_ + L::barrier_full(first), phase_);
    mbarrier_wait(shared_ + L::barrier_full(second), phase_ ^ (second == 0));
    const auto place = [&](int stage) { return base_ + L::kKv + stage * kStageBytes; };
    convert_queries(place(first), place(second), p_.softmax_scale * kv_scale_ < 0.f ? -1.f : 1.f, shared_ + L::kQ,
                    reinterpret_cast<float*>(base_ + L::kQueryScale));
    fence_async_proxy();
    give_back();
    give_back();
  }

  __device__ void begin_piece(const Piece& piece) {
    tiles_ = piece.num_tiles;
    first_box_ = ceil_div(piece.keys.begin, kPlanTileTokens) - piece.first_tile;
    last_box_ = modes_.use_boxes ? piece.keys.end / kPlanTileTokens - piece.first_tile : 0;
    const float* query = reinterpret_cast<const float*>(base_ + L::kQueryScale);
#pragma unroll
    for (int h = 0; h < kRowsPerThread; ++h) {
      const float scale = query[warp_ * 16 + lane_ / 4 + 8 * h] * fabsf(p_.softmax_scale * kv_scale_ * kLog2e);
      scale_.row[h] = scale == 0.f ? 1e-30f : scale;  // -infinity times it must stay what it is
    }
  }

  // Of the pair of tiles t and t + 1, the group's own: from its scores, which are complete, to probabilities for both.
  // Group 0's reference maxima go to group 1 first, which goes on from them.
  __device__ void give_probabilities(const Piece& piece, int t, Scores& s) {
    if (group_ == 1) {
      mbarrier_wait(shared_ + L::kMaximaReady, pair_);
      follow(0);
    }
    const int own = t + group_;
    if (own >= tiles_) {
      mbarrier_wait(shared_ + L::barrier_ready(0), pair_);
      return arrive(L::barrier_ready(1));  // of nothing, for its parity
    }
    float factor[kRowsPerThread];
    const int first_key = (piece.first_tile + own) * kPlanTileTokens;
    const ScoreScale scale = prepare_scores<kOptions>(p_, piece, rows_, scale_, first_key, s);
    move_maximum(rows_, scale, s, factor);
    publish(group_ == 0 ? pair_ : 2, factor);
    if (group_ == 0) arrive(L::kMaximaReady);
    exponentiate(rows_, scale, s);
    named_barrier_sync(kOwn + group_, kGroupThreads);  // all four warps' scores are done with the rope part
    store_probabilities(s, p_tile(stage_after(group_)));
    fence_async_proxy();
    // Before the other group can give the next: a wait knows only the parity.
    if (group_ == 1) mbarrier_wait(shared_ + L::barrier_ready(0), pair_);
    arrive(L::barrier_ready(group_));
  }

  // s = q k^T of tile t, `ahead` tiles behind the first that is not done with, in flight.
  __device__ void begin_scores(int t, int ahead, Scores& s) const {
    if (t >= tiles_) return;
    const int stage = stage_after(ahead);
    wait_tile(t, ahead);
    constexpr int kStep = attnops::sm90::kStepKMajor, kTile = kTileBytes >> 4;
    const uint32_t q = uniform_operand(shared_ + L::kQ), k = uniform_operand(kv_stage(stage));
    wgmma_fence();
#pragma unroll
    for (int tile = 0; tile < kLatentTiles; ++tile) {
#pragma unroll
      for (int step = 0; step < 4; ++step) {
        const int at = tile * kTile + step * kStep;
        wgmma_e4m3(s, group_descriptor<1024>(q + at), group_descriptor<1024>(k + at), tile + step > 0);
      }
    }
#pragma unroll
    for (int step = 0; step < 2; ++step) {
      const int at = (kRope >> 4) + step * kStep;
      wgmma_e4m3(s, half_row_descriptor(q + at), half_row_descriptor(k + at), 1);
    }
    wgmma_commit();
  }

  // o += V^T P^T of tile t for this group's 256 dims, in four blocks of 64, the first time of a pair behind the scores
  // of the group's next tile. What is in flight is then complete, and the tile is given back.
  __device__ void multiply_values(int t, int parity, Scores& s, TransposedOutput& o) {
    wait_tile(t, 0);
    uint32_t a[4][2][4];
    load_values(a);
    if (parity == 0) begin_scores(t + group_ + 2, group_ + 2, s);
    // Group 1 has waited for the even tile's before it gave its own; by now they may be those of the next pair.
    if (parity >= group_) mbarrier_wait(shared_ + L::barrier_ready(parity), pair_);
    if (parity > group_) follow(1);
    rescale(parity == 0 ? pair_ : 2, o);
    const uint32_t probabilities = uniform_operand(p_tile(stage_));
#pragma unroll
    for (int block = 0; block < 4; ++block) {
#pragma unroll
      for (int step = 0; step < 2; ++step) sort_values(a[block][step]);
      wgmma_fence();
#pragma unroll
      for (int step = 0; step < 2; ++step) {
        wgmma_e4m3(o[block], a[block][step], half_row_descriptor(probabilities + step * attnops::sm90::kStepKMajor), 1);
      }
    }
    wgmma_commit();
    wgmma_wait<0>(s, o[0], o[1], o[2], o[3]);
    give_back();
  }

  // The first stage that was not.
  __device__ void give_back() {
    arrive(L::barrier_empty(stage_));
    phase_ ^= stage_ == L::kStages - 1;
    stage_ = stage_after(1);
  }

  // Of V^T, 4 x 64 dims by two steps of 32 keys: a transposing load gives pairs of dims of two keys.
  __device__ void load_values(uint32_t (&a)[4][2][4]) const {
    const uint32_t tile = kv_stage(stage_) + group_ * 2 * kTileBytes;
    const uint32_t first = tile + attnops::sm90::swizzled(lane_, warp_);
#pragma unroll
    for (int block = 0; block < 4; ++block) {
#pragma unroll
      for (int step = 0; step < 2; ++step) {
        // Chunks of 16 dims are permuted by exclusive or: four on is bit 6 of the address turned.
        const uint32_t place = (block % 2 ? first ^ 64 : first) + block / 2 * kTileBytes + step * 32 * 128;
        attnops::sm90::load_transposed(a[block][step], place);
      }
    }
  }

  // Such pairs to a fragment: of the warp's sixteen dims, even ones become rows 0 .. 7 and odd ones rows 8 .. 15.
  __device__ static void sort_values(uint32_t (&a)[4]) {
#pragma unroll
    for (int i = 0; i < 4; i += 2) {
      const uint32_t even = __byte_perm(a[i], a[i + 1], 0x6420), odd = __byte_perm(a[i], a[i + 1], 0x7531);
      a[i] = even, a[i + 1] = odd;
    }
    attnops::sm90::pin(a);  // before the products' fence
  }

  // The columns of the transposed output are rows of q, so their factors come from shared memory.
  __device__ void rescale(int which, TransposedOutput& o) const {
    if (!reinterpret_cast<const volatile int*>(base_ + L::kRescales)[which]) return;
    const float2* factors = reinterpret_cast<const float2*>(base_ + L::kFactors + which * 256) + lane_ % 4;
#pragma unroll
    for (int j = 0; j < 8; ++j) {
      const float2 factor = factors[4 * j];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        o[i][4 * j + 0] *= factor.x;
        o[i][4 * j + 1] *= factor.y;
        o[i][4 * j + 2] *= factor.x;
        o[i][4 * j + 3] *= factor.y;
      }
    }
  }

  // Tells both groups what this tile makes of the maxima.
  __device__ void publish(int which, const float (&factor)[kRowsPerThread]) const {
    const bool moved = __any_sync(0xffffffffu, factor[0] != 1.f || factor[1] != 1.f);
    if (lane_ == 0) base_[L::kRescales + 4 * which + warp_] = moved;
    publish_maximum(rows_, maxima(group_));
    if (lane_ % 4 != 0) return;
    float* factors = reinterpret_cast<float*>(base_ + L::kFactors + which * 256);
#pragma unroll
    for (int h = 0; h < kRowsPerThread; ++h) factors[warp_ * 16 + lane_ / 4 + 8 * h] = factor[h];
  }

  __device__ void follow(int parity) {
    float factor[kRowsPerThread];
    follow_maximum(rows_, maxima(parity), factor);
  }

  __device__ uint32_t kv_stage(int stage) const { return shared_ + L::kKv + stage * kStageBytes; }
  __device__ uint32_t p_tile(int stage) const { return kv_stage(stage) + kRope; }
  __device__ float* maxima(int parity) const { return reinterpret_cast<float*>(base_ + L::kMaxima) + parity * 64; }

  // `count` tiles behind the first that is not done with.
  __device__ int stage_after(int count) const {
    const int stage = stage_ + count;
    return stage >= L::kStages ? stage - L::kStages : stage;
  }

  // For tile t, `ahead` tiles behind the first that is not done with.
  __device__ void wait_tile(int t, int ahead) const {
    const uint32_t phase = phase_ ^ (stage_ + ahead >= L::kStages);
    mbarrier_wait(shared_ + L::barrier_full(stage_after(ahead)), phase);
    if (t < first_box_ || t >= last_box_) fence_async_proxy();  // rows arrive by ordinary writes
  }

  // By each warp.
  __device__ void arrive(int barrier) const {
    __syncwarp();
    attnops::sm90::mbarrier_arrive_if(shared_ + barrier, lane_ == 0);
  }

  const Params& p_;
  const Modes& modes_;
  uint8_t* const base_;
  const uint32_t shared_;
  const int group_, lane_, warp_;
  const float kv_scale_;
  RowState rows_;
  ScoreScale scale_;
  int tiles_, first_box_, last_box_;  // of the piece; those that come by the copy engine
  int stage_ = 0;                     // of the first tile that is not done with
  uint32_t phase_ = 0;                // of its stage
  uint32_t pair_ = 0;                 // parity
};

// By the lanes of a warp, one barrier each.
__device__ inline void init_barriers(uint32_t shared) {
  using L = Layout;
  const int i = threadIdx.x % 32;
  const int arrivals = i < L::kStages ? kGroupThreads : i < 2 * L::kStages ? kConsumerThreads / 32 : kGroupThreads / 32;
  if (i < L::kBarrierCount) attnops::sm90::mbarrier_init(shared + L::kBarriers + 8 * i, arrivals);
  attnops::sm90::mbarrier_init_fence();
}

// What one warp does before all others begin: the part's row of the plan, the barriers.
__device__ inline void start(const Params& p, const Maps& maps, const Modes& modes, uint8_t* base, uint32_t shared) {
  const int lane = threadIdx.x % 32;
  auto* entry = reinterpret_cast<int*>(base + Layout::kEntry);
  int word = 0;
  if (lane < 8) word = reinterpret_cast<const int*>(&entry_of(p, blockIdx.x))[lane];
  if (lane == 8 && modes.use_boxes) attnops::sm90::prefetch_map(&maps.latent);
  if (lane == 9 && modes.use_boxes) attnops::sm90::prefetch_map(&maps.rope);
  if (lane == 10 && modes.queries_by_map) attnops::sm90::prefetch_map(&maps.queries.q);
  init_barriers(shared);
  if (lane < 8) entry[lane] = word;
}

template <typename T, Options kOptions>
__global__ void __launch_bounds__(kThreads, 1)
    mla_decode_fp8_products_kernel(const __grid_constant__ Params p, const __grid_constant__ Maps maps,
                                   const __grid_constant__ Modes modes) {
  extern __shared__ __align__(1024) uint8_t shared_bytes[];
  const uint32_t shared = attnops::sm90::smem_address(shared_bytes);
  if (threadIdx.x / 32 == kConsumerThreads / 32) start(p, maps, modes, shared_bytes, shared);
  __syncthreads();
  attnops::sm90::launch_dependents();
  const int group = __shfl_sync(0xffffffffu, threadIdx.x / kGroupThreads, 0);
  if (group < 2) {
    attnops::sm90::registers_increase<kConsumerRegisters>();
    Consumer<T, kOptions>(p, modes, group, shared_bytes, shared).run();
  } else {
    attnops::sm90::registers_decrease<kLoaderRegisters>();
    Loader<kOptions>(p, maps, modes, *reinterpret_cast<const SplitKvEntry*>(shared_bytes + Layout::kEntry), shared)
        .run();
  }
}

}  // namespace attnops::mla_decode::sm90::fp8_products
