#pragma once
#include "mla_decode/sm90/fp8_products/epilogue.cuh"
#include "mla_decode/sm90/fp8_products/layout.h"
#include "mla_decode/sm90/fp8_products/load.cuh"
#include "mla_decode/sm90/fp8_products/queries.cuh"
#include "mla_decode/sm90/fp8_products/softmax.cuh"

// MLA decode over dense e4m3 caches on the e4m3 units; docs/kernels/mla_decode_fp8.md.
//
// Two warpgroups share the 64 x 512 output by columns. Group 0 computes scores and probabilities of even tiles, group 1
// those of odd ones, and both multiply both with their own columns of V. The output is computed transposed, as
// V^T P^T: V^T comes from shared memory by transposing loads and two byte permutations a register, which no other
// layout of a one-byte operand allows. The units keep 13 bits of a sum, which the rounding of q and P hides.
namespace attnops::mla_decode::sm90::fp8_products {

using attnops::sm90::fence_async_proxy;
using attnops::sm90::named_barrier_arrive;
using attnops::sm90::named_barrier_sync;
using attnops::sm90::operand_descriptor;
using attnops::sm90::wgmma_commit;
using attnops::sm90::wgmma_e4m3;
using attnops::sm90::wgmma_fence;
using attnops::sm90::wgmma_wait;

// What the host has found out about the arguments.
struct Modes {
  bool use_boxes;    // whole tiles come by the copy engine
  bool out_aligned;  // rows of the output start on 16-byte boundaries
};

template <typename T, int kGroup>
class Consumer {
  using L = Layout;

 public:
  __device__ Consumer(const Params& p, const Modes& modes, uint8_t* base, uint32_t shared)
      : p_(p), modes_(modes), base_(base), shared_(shared), kv_scale_(p.kv_scale ? *p.kv_scale : 1.f) {}

  __device__ void run() {
    PieceWalk walk(p_);
    Piece piece;
    float o[4][32];
    while (walk.next(p_, piece)) {
      // The barrier at the end of the piece before stands between its scores and these queries.
      load_queries<T>(p_, piece, base_, shared_);
      fence_async_proxy();
      named_barrier_sync(kConsumers, kConsumerThreads);
      rows_.begin(p_, piece);
      begin_scale();
#pragma unroll
      for (int i = 0; i < 128; ++i) o[i / 32][i % 32] = 0.f;
      for (int t = 0; t < piece.num_tiles; t += 2) {
        if constexpr (kGroup == 0) {
          step_even(piece, t, o);
        } else {
          step_odd(piece, t, o);
        }
        pair_ ^= 1;
      }
      finish_piece<T, L>(p_, piece, rows_, base_, kGroup, kv_scale_, modes_.out_aligned, o);
    }
  }

 private:
  // The steps take a pair of tiles, t and t + 1.
  __device__ void step_even(const Piece& piece, int t, float (&o)[4][32]) {
    const bool has_odd = t + 1 < piece.num_tiles;
    const int stage = stage_;
    Values values;
    {
      float s[32], factor[kRowsPerThread];
      wait_tile(piece, t, stage);
      multiply_queries(stage, s);
      wgmma_wait<0>(s);
      const int first_key = (piece.first_tile + t) * kPlanTileTokens;
      const ScoreScale scale = prepare_scores(p_, piece, rows_, scale_, first_key, s);
      move_maximum(rows_, scale, s, factor);
      publish(pair_, factor);
      named_barrier_arrive(kMaximum0, kConsumerThreads);
      exponentiate(rows_, scale, s);
      store_probabilities(s, p_tile(pair_));
      fence_async_proxy();
      load_early(stage, values);
      named_barrier_sync(kOwn0, kGroupThreads);  // this group's factors and probabilities, all four warps'
      named_barrier_arrive(kReady0, kConsumerThreads);
    }
    multiply_values(values, pair_, o);
    advance(piece, t);
    if (!has_odd) return;
    const int odd_stage = stage_;
    wait_tile(piece, t + 1, odd_stage);
    load_early(odd_stage, values);
    named_barrier_sync(kReady1, kConsumerThreads);
    follow(1);
    multiply_values(values, 2, o);
    advance(piece, t + 1);
  }

  __device__ void step_odd(const Piece& piece, int t, float (&o)[4][32]) {
    const bool has_odd = t + 1 < piece.num_tiles;
    const int even_stage = stage_, stage = next_stage(stage_);
    Values values;
    wait_tile(piece, t, even_stage);
    if (has_odd) {
      float s[32], factor[kRowsPerThread];
      wait_tile(piece, t + 1, stage);
      multiply_queries(stage, s);
      wgmma_wait<0>(s);
      named_barrier_sync(kMaximum0, kConsumerThreads);
      follow(0);
      const int first_key = (piece.first_tile + t + 1) * kPlanTileTokens;
      const ScoreScale scale = prepare_scores(p_, piece, rows_, scale_, first_key, s);
      move_maximum(rows_, scale, s, factor);
      exponentiate(rows_, scale, s);
      publish(2, factor);
      store_probabilities(s, p_tile(2));
      fence_async_proxy();
      load_early(even_stage, values);
      named_barrier_sync(kReady0, kConsumerThreads);
      named_barrier_sync(kOwn1, kGroupThreads);
      named_barrier_arrive(kReady1, kConsumerThreads);
    } else {
      load_early(even_stage, values);
      named_barrier_sync(kMaximum0, kConsumerThreads);
      follow(0);
      named_barrier_sync(kReady0, kConsumerThreads);
    }
    multiply_values(values, pair_, o);
    advance(piece, t);
    if (!has_odd) return;
    load_early(stage, values);
    multiply_values(values, 2, o);
    advance(piece, t + 1);
  }

  // s = q k^T of the tile in `stage`, in flight.
  __device__ void multiply_queries(int stage, float (&s)[32]) const {
    constexpr int kStep = attnops::sm90::kStepKMajor;
    const uint64_t q = operand_descriptor(uniform(shared_ + L::kQ)), k = operand_descriptor(uniform(kv_tile(stage, 0)));
    constexpr int kTile = kTileBytes >> 4;
    wgmma_fence();
#pragma unroll
    for (int tile = 0; tile < kKeyTiles; ++tile) {
#pragma unroll
      for (int step = 0; step < (tile < kLatentTiles ? 4 : 2); ++step) {
        wgmma_e4m3(s, q + tile * kTile + step * kStep, k + tile * kTile + step * kStep, tile + step > 0);
      }
    }
    wgmma_commit();
  }

  // Fragments of V^T for all four blocks. They need no probabilities, so a group loads them before it waits for those.
  struct Values {
    uint32_t a[4][2][4];
  };

  __device__ void load_early(int stage, Values& values) const {
#pragma unroll
    for (int block = 0; block < 4; ++block) load_values(stage, block, values.a[block]);
    release(stage);
  }

  // o += V^T P^T for this group's 256 dims, in four blocks of 64.
  __device__ void multiply_values(const Values& values, int which, float (&o)[4][32]) const {
    rescale(which, o);
#pragma unroll
    for (int block = 0; block < 4; ++block) multiply_block(values.a[block], which, o[block]);
    wgmma_wait<0>(o[0], o[1], o[2], o[3]);
  }

  // Fragments of V^T, 64 dims by two steps of 32 keys. A transposing load gives pairs of dims of two keys; of the
  // warp's sixteen dims, even ones become rows 0 .. 7 and odd ones rows 8 .. 15.
  __device__ void load_values(int stage, int block, uint32_t (&a)[2][4]) const {
    const int lane = threadIdx.x % 32, warp = threadIdx.x % kGroupThreads / 32;
    const int dim = kGroup * 256 + block * 64 + warp * 16;
#pragma unroll
    for (int step = 0; step < 2; ++step) {
      uint32_t r[4];
      attnops::sm90::load_transposed(
          r, kv_tile(stage, dim / 128) + attnops::sm90::swizzled(32 * step + lane, dim % 128 / 16));
      a[step][0] = __byte_perm(r[0], r[1], 0x6420);
      a[step][1] = __byte_perm(r[0], r[1], 0x7531);
      a[step][2] = __byte_perm(r[2], r[3], 0x6420);
      a[step][3] = __byte_perm(r[2], r[3], 0x7531);
    }
  }

  // d += 64 dims of V^T times P^T, in flight.
  __device__ void multiply_block(const uint32_t (&a)[2][4], int which, float (&d)[32]) const {
    const uint64_t probabilities = operand_descriptor(uniform(p_tile(which)));
    wgmma_fence();
#pragma unroll
    for (int step = 0; step < 2; ++step) {
      wgmma_e4m3(d, a[step], probabilities + step * attnops::sm90::kStepKMajor, 1);
    }
    wgmma_commit();
  }

  // The columns of the transposed output are rows of q, so their factors come from shared memory.
  __device__ void rescale(int which, float (&o)[4][32]) const {
    if (!reinterpret_cast<const volatile int*>(base_ + L::kRescales)[which]) return;
    const float2* factors = reinterpret_cast<const float2*>(base_ + L::kFactors + which * 256) + threadIdx.x % 4;
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
    const int lane = threadIdx.x % 32, warp = threadIdx.x % kGroupThreads / 32;
    const bool moved = __any_sync(0xffffffffu, factor[0] != 1.f || factor[1] != 1.f);
    if (lane == 0) base_[L::kRescales + 4 * which + warp] = moved;
    publish_maximum(rows_, maxima(kGroup));
    if (lane % 4 != 0) return;
    float* factors = reinterpret_cast<float*>(base_ + L::kFactors + which * 256);
#pragma unroll
    for (int h = 0; h < kRowsPerThread; ++h) factors[warp * 16 + lane / 4 + 8 * h] = factor[h];
  }

  __device__ void follow(int parity) {
    float factor[kRowsPerThread];
    follow_maximum(rows_, maxima(parity), factor);
  }

  // What a raw score of this thread's rows is multiplied by.
  __device__ void begin_scale() {
    const int lane = threadIdx.x % 32, warp = threadIdx.x % kGroupThreads / 32;
    const float* query = reinterpret_cast<const float*>(base_ + L::kQueryScale);
#pragma unroll
    for (int h = 0; h < kRowsPerThread; ++h) {
      scale_.row[h] = query[warp * 16 + lane / 4 + 8 * h] * (p_.softmax_scale * kv_scale_ * kLog2e);
    }
  }

  // The same in all lanes, and the compiler knows: descriptors then need no move to uniform registers each.
  __device__ static uint32_t uniform(uint32_t value) { return __shfl_sync(0xffffffffu, value, 0); }

  __device__ uint32_t kv_tile(int stage, int tile) const {
    return shared_ + L::kKv + stage * kStageBytes + tile * kTileBytes;
  }
  __device__ uint32_t p_tile(int which) const { return shared_ + L::kP + which * kTileBytes; }
  __device__ float* maxima(int parity) const { return reinterpret_cast<float*>(base_ + L::kMaxima) + parity * 64; }

  __device__ static int next_stage(int stage) { return stage + 1 == L::kStages ? 0 : stage + 1; }

  __device__ void wait_tile(const Piece& piece, int t, int stage) const {
    if (is_boxed(piece, piece.first_tile + t, modes_.use_boxes)) {
      mbarrier_wait(shared_ + L::barrier_box(stage), parity_ >> stage & 1);
    } else {
      mbarrier_wait(shared_ + L::barrier_gather(stage), parity_ >> (8 + stage) & 1);
      fence_async_proxy();  // rows arrive by ordinary writes
    }
  }

  // Tile t is done with.
  __device__ void advance(const Piece& piece, int t) {
    parity_ ^= 1u << (is_boxed(piece, piece.first_tile + t, modes_.use_boxes) ? stage_ : 8 + stage_);
    stage_ = next_stage(stage_);
  }

  __device__ void release(int stage) const {
    __syncwarp();
    attnops::sm90::mbarrier_arrive_if(shared_ + L::barrier_empty(stage), threadIdx.x % 32 == 0);
  }

  const Params& p_;
  const Modes& modes_;
  uint8_t* const base_;
  const uint32_t shared_;
  const float kv_scale_;
  RowState rows_;
  ScoreScale scale_;
  int stage_ = 0;        // of the pair's first tile that is not done with
  int pair_ = 0;         // parity
  uint32_t parity_ = 0;  // of the phase to wait for: bit `stage` for boxes, 8 + stage for rows
};

__device__ inline void init_barriers(uint32_t shared) {
  using L = Layout;
  for (int stage = 0; stage < L::kStages; ++stage) {
    attnops::sm90::mbarrier_init(shared + L::barrier_box(stage), 1);
    attnops::sm90::mbarrier_init(shared + L::barrier_gather(stage), kGroupThreads);
    attnops::sm90::mbarrier_init(shared + L::barrier_empty(stage), kConsumerThreads / 32);
  }
  attnops::sm90::mbarrier_init_fence();
}

template <typename T>
__global__ void __launch_bounds__(kThreads, 1)
    mla_decode_fp8_products_kernel(const __grid_constant__ Params p, const __grid_constant__ CUtensorMap map,
                                   const __grid_constant__ Modes modes) {
  extern __shared__ __align__(1024) uint8_t shared_bytes[];
  const uint32_t shared = attnops::sm90::smem_address(shared_bytes);
  if (threadIdx.x == 0) {
    init_barriers(shared);
    if (modes.use_boxes) attnops::sm90::prefetch_map(&map);
  }
  __syncthreads();
  attnops::sm90::launch_dependents();
  const int group = threadIdx.x / kGroupThreads;
  if (group == 0) {
    attnops::sm90::registers_increase<kConsumerRegisters>();
    Consumer<T, 0>(p, modes, shared_bytes, shared).run();
  } else if (group == 1) {
    attnops::sm90::registers_increase<kConsumerRegisters>();
    Consumer<T, 1>(p, modes, shared_bytes, shared).run();
  } else {
    attnops::sm90::registers_decrease<kLoaderRegisters>();
    Loader<Layout>(p, &map, modes.use_boxes, shared).run();
  }
}

}  // namespace attnops::mla_decode::sm90::fp8_products
