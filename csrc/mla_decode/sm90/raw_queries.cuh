#pragma once
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

#include "device/sm90/barrier.cuh"
#include "device/sm90/copy.cuh"
#include "device/sm90/wgmma.cuh"
#include "mla_decode/sm90/layout.h"
#include "mla_decode/sm90/pieces.cuh"

// Queries on their way into the kernels for e4m3 caches, which multiply them in another type: they come through the
// ring of KV tiles in two stages. A stage has 256 dims of the latent part, as one box of four tiles of 64 x 64 elements
// under the 128-byte swizzle, and behind them 32 dims of the rope part, rows of 64 bytes. A thread takes a while for
// each box that it asks for, and the copy engine for each row of one: so boxes are few, and their rows long.
namespace attnops::mla_decode::sm90 {

inline constexpr int kQueryStages = 2;
inline constexpr int kQueryTiles = kHeadDimV / 64 / kQueryStages, kQueryRopeDims = kHeadDimRope / kQueryStages;
inline constexpr int kQueryRopeBytes = kPlanRows * kQueryRopeDims * 2;
inline constexpr int kQueryStageSteps = kQueryTiles * 2;  // of 32 dims of the latent part

struct QueryMaps {
  CUtensorMap q, q_pe;  // the latent part; the rope part, wherever it is
};

// What loading warp `warp` asks for, by one thread: the first the latent part, the second the rope part of stage
// `half`. Without kRope queries are 512 wide and have no such part.
template <bool kRope = true>
__device__ inline int query_bytes(int warp) {
  return warp == 0 ? kQueryTiles * kTileBytes : kRope && warp == 1 ? kQueryRopeBytes : 0;
}
template <bool kRope = true>
__device__ inline void copy_queries_of_warp(const QueryMaps& maps, int warp, int request, int first_row, int half,
                                            uint32_t stage, uint32_t barrier) {
  if (warp == 0) attnops::sm90::copy_box(stage, &maps.q, barrier, 0, first_row, half * kQueryTiles, request);
  if (!kRope || warp != 1) return;
  attnops::sm90::copy_box(stage + kQueryTiles * kTileBytes, &maps.q_pe, barrier, half * kQueryRopeDims, first_row,
                          request);
}

// Where 16 bytes of a row lie in a stage: chunk 0 .. 7 of a tile, chunk 0 .. 3 of the rope part.
__device__ inline int query_chunk(int tile, int row, int chunk) {
  return tile < kQueryTiles ? tile * kTileBytes + attnops::sm90::swizzled(row, chunk)
                            : kQueryTiles * kTileBytes + row * 64 + chunk * 16;
}

// The same where the copy engine cannot fetch them, by kGroupThreads threads.
template <bool kRope = true>
__device__ inline void gather_queries(const Params& p, const Piece& piece, int half, uint32_t stage) {
  const int thread = threadIdx.x % kGroupThreads, row = thread / 2;
  const bool valid = row < piece.num_rows;
  const RowPlace at = row_place(p, piece.first_row + (valid ? row : 0));
  const QueryPlace q = query_place(p, piece.request, at);
#pragma unroll 1
  for (int tile = 0; tile < kQueryTiles + kRope; ++tile) {
    const auto* source = tile < kQueryTiles ? q.latent + (half * kQueryTiles + tile) * 128 : q.rope + half * 64;
    const int chunks = tile < kQueryTiles ? 8 : 4;
#pragma unroll 1
    for (int chunk = thread % 2; chunk < chunks; chunk += 2) {
      attnops::sm90::copy16(stage + query_chunk(tile, row, chunk), source + chunk * 16, valid);
    }
  }
}

// Eight dims of a row.
struct QueryChunk {
  uint32_t pair[4];
};

// A row of 16-bit queries in shared memory, by the four lanes of a quad.
template <bool kRope = true>
class RawQueryRow {
 public:
  // Of row `row` and lane `quad` of its four; the addresses of its two stages.
  __device__ RawQueryRow(const uint8_t* first, const uint8_t* second, int row, int quad)
      : stages_{first, second}, row_(row), quad_(quad) {}

  // Calls each(x, piece, upper) for all that a lane has of a stage: x is eight dims from 64 piece + 32 upper + 8 quad
  // on, and piece 8 is the rope part. Neighbouring rows begin at different halves of a piece, for the banks.
  template <int kUnroll, class Each>
  __device__ void each_chunk(int half, const Each& each) const {
    const uint8_t* stage = half == 0 ? stages_[0] : stages_[1];
#pragma unroll kUnroll
    for (int tile = 0; tile < kQueryTiles; ++tile) {
#pragma unroll
      for (int turn = 0; turn < 2; ++turn) {
        const int upper = (turn ^ row_) & 1;
        each(load(stage, tile, upper * 4 + quad_), half * kQueryTiles + tile, upper);
      }
    }
    if constexpr (kRope) each(load(stage, kQueryTiles, quad_), kHeadDimV / 64, half);
  }

  // Of what a lane has seen, the bits of the largest magnitudes of even and odd dims.
  __device__ static void follow(const QueryChunk& x, uint32_t& top) {
#pragma unroll
    for (int i = 0; i < 4; ++i) top = __vmaxu2(top, x.pair[i] & 0x7fff7fffu);
  }

  // The bits of the largest magnitude of the row; a NaN is larger than all.
  __device__ uint32_t largest() const {
    uint32_t top = 0;
#pragma unroll 1
    for (int half = 0; half < kQueryStages; ++half) {
      each_chunk<2>(half, [&](const QueryChunk& x, int, int) { follow(x, top); });
    }
    return largest(top);
  }
  // The same where each lane of the quad has seen all that it has.
  __device__ static uint32_t largest(uint32_t top) {
    top = __vmaxu2(top, __shfl_xor_sync(0xffffffffu, top, 1));
    top = __vmaxu2(top, __shfl_xor_sync(0xffffffffu, top, 2));
    return max(top & 0xffffu, top >> 16);
  }

 private:
  __device__ QueryChunk load(const uint8_t* stage, int tile, int chunk) const {
    const uint4 x = *reinterpret_cast<const uint4*>(stage + query_chunk(tile, row_, chunk));
    return {x.x, x.y, x.z, x.w};
  }

  const uint8_t* const stages_[kQueryStages];
  const int row_, quad_;
};

__device__ inline float2 unpack_pair(uint32_t pair, __nv_bfloat16) {
  return {__uint_as_float(pair << 16), __uint_as_float(pair & 0xffff0000u)};
}
__device__ inline float2 unpack_pair(uint32_t pair, __half) {
  return __half22float2(reinterpret_cast<const __half2&>(pair));
}

// Powers of two: what brings the largest bf16 magnitude, by its bits, to [2^kTop, 2^(kTop + 1)), and its inverse, both
// normal numbers; the inverse is a NaN where the largest is not finite, which the row must show.
template <int kTop>
struct QueryScale {
  float factor, inverse;

  __device__ explicit QueryScale(uint32_t largest_bits) {
    const int exponent = largest_bits == 0 ? 0 : static_cast<int>(largest_bits >> 7) - 127;
    const int shift = min_of(max_of(kTop - exponent, -126), 126);
    factor = __int_as_float((shift + 127) << 23);
    inverse = largest_bits < 0x7f80u ? __int_as_float((127 - shift) << 23) : NAN;
  }
};

}  // namespace attnops::mla_decode::sm90
