#pragma once
#include "device/sm90/wgmma_few.cuh"
#include "device/sm90/wgmma_fp8.cuh"
#include "mla_decode/sm90/fp8_products/layout.h"
#include "mla_decode/sm90/fp8_products/load.cuh"
#include "mla_decode/sm90/fp8_products/queries.cuh"
#include "mla_decode/sm90/fp8_products/softmax.cuh"
#include "mla_decode/sm90/transposed_results.cuh"

namespace attnops::mla_decode::sm90::fp8_products {

static_assert(sizeof(TransposedEnds) == 64 * 16);

// No value of V is larger, without its scale; what rounding probabilities adds is in it.
inline constexpr float kMostValue = 480.f;

// One of the two warpgroups with the output: O^T += V^T P^T of every tile, 256 columns of V each. They bring the
// queries, too: at the start of a piece they have nothing to multiply yet.
template <typename T, Options kOptions>
class ValueConsumer {
  using L = Layout;
  using Fragments = uint32_t[2][4];              // of 64 dims
  static constexpr int kBlocks = 4, kAhead = 2;  // of 64 dims; of these, loads
  using Output = TransposedOutput<kPlanRows>;

 public:
  __device__ ValueConsumer(const Params& p, const Modes& modes, int group, uint8_t* base, uint32_t shared)
      : p_(p),
        out_aligned_(modes.out_aligned),
        base_(base),
        shared_(shared),
        group_(group),
        lane_(threadIdx.x % 32),
        warp_(threadIdx.x % kGroupThreads / 32),
        kv_scale_(p.kv_scale ? *p.kv_scale : 1.f) {}

  __device__ void run() {
    PieceWalkFor<kOptions> walk(*reinterpret_cast<const SplitKvEntry*>(base_ + L::kEntry));
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
      for (int i = 0; i < 128; ++i) o[i / 32][i % 32] = 0.f;
#pragma unroll 1
      for (; tiles > 0; --tiles) {
        multiply_values(o);
        ring_.advance();
        ++taken_;
      }
      attnops::sm90::mbarrier_meet(shared_ + L::kTotalsThere);
      more = walk.next(p_, piece);
    }
  }

 private:
  // What is left to know of a piece when it is stored: registers are full of the output.
  __device__ StoredPiece* stored(int parity) const {
    return reinterpret_cast<StoredPiece*>(base_ + L::kStored) + parity;
  }

  // They come through the ring, in two stages of it.
  __device__ void take_queries(const Piece& piece) {
    const Ring first = ring_;
    ring_.advance();
    mbarrier_wait(shared_ + L::barrier_full(first.stage), first.phase);
    mbarrier_wait(shared_ + L::barrier_full(ring_.stage), ring_.phase);
    const auto place = [&](int stage) { return base_ + L::kKv + stage * kStageBytes; };
    if (threadIdx.x == 0) {
      *reinterpret_cast<int*>(base_ + L::kParity) = parity_ ^ 1;
      *stored(parity_ ^ 1) = {piece.request, piece.first_row, piece.num_rows, piece.partial};
    }
    convert_queries(place(first.stage), place(ring_.stage), p_.softmax_scale * kv_scale_ < 0.f ? -1.f : 1.f,
                    shared_ + L::kQ, reinterpret_cast<float*>(base_ + L::kQueryScale), [&](int half) {
                      attnops::sm90::fence_async_proxy();
                      arrive(L::barrier_empty(half == 0 ? first.stage : ring_.stage));
                      arrive(L::barrier_queries(half));
                    });
    ring_.advance();
  }

  // o += V^T P^T of the next tile for this group's 256 dims, in four blocks of 64; tile and probabilities are given
  // back.
  __device__ void multiply_values(Output& o) const {
    const int buffer = taken_ % L::kBuffers;
    Fragments a[kAhead + 1];
    mbarrier_wait(shared_ + L::barrier_full(ring_.stage), ring_.phase);
#pragma unroll
    for (int block = 0; block < kAhead; ++block) load_values(block, a[block]);
    mbarrier_wait(shared_ + L::barrier_given(buffer), taken_ / L::kBuffers & 1);
    const uint32_t moved = reinterpret_cast<const volatile uint32_t*>(base_ + L::kRescales)[buffer];
    if (moved) rescale(buffer, moved, o);
    const uint32_t probabilities = attnops::sm90::uniform_operand(shared_ + L::kP + buffer * L::kProbabilityBytes);
#pragma unroll
    for (int block = 0; block < kBlocks; ++block) {
      Fragments& now = a[block % (kAhead + 1)];
      sort_values(now);
      attnops::sm90::wgmma_fence();
#pragma unroll
      for (int step = 0; step < 2; ++step) {
        const uint32_t operand = probabilities + step * attnops::sm90::kStepKMajor;
        attnops::sm90::wgmma_e4m3(o[block], now[step], attnops::sm90::half_row_descriptor(operand), 1);
      }
      attnops::sm90::wgmma_commit();
      if (block + kAhead >= kBlocks) continue;
      if (block > 0) attnops::sm90::wgmma_wait<1>();
      load_values(block + kAhead, a[(block + kAhead) % (kAhead + 1)]);
    }
    arrive(L::barrier_empty(ring_.stage));
    attnops::sm90::wgmma_wait<0>(o[0], o[1], o[2], o[3]);
    arrive(L::barrier_taken(buffer));
  }

  // Of V^T, 64 dims by two steps of 32 keys: a transposing load gives pairs of dims of two keys.
  __device__ void load_values(int block, Fragments& a) const {
    const uint32_t tile = shared_ + L::kKv + ring_.stage * kStageBytes + group_ * 2 * kTileBytes;
    const uint32_t first = tile + attnops::sm90::swizzled(lane_, warp_);
#pragma unroll
    for (int step = 0; step < 2; ++step) {
      // Chunks of 16 dims are permuted by exclusive or: four on is bit 6 of the address turned.
      const uint32_t place = (block % 2 ? first ^ 64 : first) + block / 2 * kTileBytes + step * 32 * 128;
      attnops::sm90::load_transposed(a[step], place);
    }
  }

  // Such pairs to a fragment: of the warp's sixteen dims, even ones become rows 0 .. 7 and odd ones rows 8 .. 15.
  __device__ static void sort_values(Fragments& a) {
#pragma unroll
    for (int step = 0; step < 2; ++step) {
#pragma unroll
      for (int i = 0; i < 4; i += 2) {
        const uint32_t low = a[step][i], high = a[step][i + 1];
        a[step][i] = __byte_perm(low, high, 0x6420), a[step][i + 1] = __byte_perm(low, high, 0x7531);
      }
      attnops::sm90::pin(a[step]);  // before the products' fence
    }
  }

  // The columns of the transposed output are rows of q, so their factors come from shared memory, where the warp that
  // has a row says so.
  __device__ void rescale(int buffer, uint32_t moved, Output& o) const {
    const float2* factors = reinterpret_cast<const float2*>(base_ + L::kFactors + buffer * 256) + lane_ % 4;
#pragma unroll
    for (int j = 0; j < 8; ++j) {
      const float2 factor = moved >> j / 2 * 8 & 1 ? factors[4 * j] : float2{1.f, 1.f};
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        o[i][4 * j + 0] *= factor.x;
        o[i][4 * j + 1] *= factor.y;
        o[i][4 * j + 2] *= factor.x;
        o[i][4 * j + 3] *= factor.y;
      }
    }
  }

  __device__ void finish_piece(Output& o) const {
    Piece piece;
    piece.request = stored(parity_)->request, piece.first_row = stored(parity_)->first_row;
    piece.num_rows = stored(parity_)->num_rows, piece.partial = stored(parity_)->partial;
    TransposedEnds& ends = *reinterpret_cast<TransposedEnds*>(base_ + L::kEnds);
    if (threadIdx.x < 64) {
      const int row = threadIdx.x;
      const float* totals = reinterpret_cast<const float*>(base_ + L::totals(parity_));
      end_row<kOptions>(p_, piece, row, totals[row], totals[64 + row] - kLift, kv_scale_, kMostValue, ends);
    }
    attnops::sm90::named_barrier_sync(kValueWarps, kValueThreads);
    store_transposed<T, kOptions>(p_, piece, ends, group_, out_aligned_, o);
  }

  __device__ void arrive(int barrier) const { attnops::sm90::mbarrier_arrive(shared_ + barrier); }

  const Params& p_;
  const bool out_aligned_;
  uint8_t* const base_;
  const uint32_t shared_;
  const int group_, lane_, warp_;
  const float kv_scale_;
  Ring ring_;
  int taken_ = 0;   // tiles so far
  int parity_ = 1;  // of the piece
};

}  // namespace attnops::mla_decode::sm90::fp8_products
