#pragma once
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

#include "device/sm90/barrier.cuh"
#include "device/sm90/copy.cuh"
#include "mla_decode/sm90/layout.h"
#include "mla_decode/sm90/pieces.cuh"

// Queries on their way into the kernels for e4m3 caches, which multiply them in another type: they come through the
// ring of KV tiles, as boxes of 32 dims of 64 rows (rows of 64 bytes, 4 KB each), nine boxes in each of two stages.
namespace attnops::mla_decode::sm90 {

inline constexpr int kQueryBoxDims = 32, kQueryBoxBytes = kPlanRows * kQueryBoxDims * 2;
inline constexpr int kQueryStages = 2, kQueryBoxes = kHeadDimQk / kQueryBoxDims / kQueryStages;  // of a stage
static_assert(kQueryBoxes * kQueryStages * kQueryBoxDims == kHeadDimQk);

struct QueryMaps {
  CUtensorMap q, q_pe;
};

// Boxes first, first + step, ... of stage `half`, by one thread; returns their bytes, which the caller has announced.
__device__ inline void copy_query_boxes(const Params& p, const QueryMaps& maps, int request, int first_row, int half,
                                        int first, int step, uint32_t stage, uint32_t barrier) {
#pragma unroll 1
  for (int i = first; i < kQueryBoxes; i += step) {
    const int dim = (half * kQueryBoxes + i) * kQueryBoxDims;
    const bool apart = p.q_pe && dim >= kHeadDimV;
    attnops::sm90::copy_box(stage + i * kQueryBoxBytes, apart ? &maps.q_pe : &maps.q, barrier,
                            apart ? dim - kHeadDimV : dim, first_row, request);
  }
}

// The same where the copy engine cannot fetch them, by kGroupThreads threads.
__device__ inline void gather_query_boxes(const Params& p, const Piece& piece, int half, uint32_t stage) {
  constexpr int kElement = 2;
  const int thread = threadIdx.x % kGroupThreads, row = thread / 2;
  const bool valid = row < piece.num_rows;
  const RowPlace at = row_place(p, piece.first_row + (valid ? row : 0));
  const QueryPlace q = query_place(p, piece.request, at);
#pragma unroll 1
  for (int i = 0; i < kQueryBoxes; ++i) {
    const int dim = (half * kQueryBoxes + i) * kQueryBoxDims;
    const auto* source = dim >= kHeadDimV ? q.rope + (dim - kHeadDimV) * kElement : q.latent + dim * kElement;
#pragma unroll
    for (int c = 0; c < 2; ++c) {
      const int chunk = thread % 2 * 2 + c;
      attnops::sm90::copy16(stage + i * kQueryBoxBytes + row * 64 + chunk * 16, source + chunk * 16, valid);
    }
  }
}

// Eight dims of a row.
struct QueryChunk {
  uint32_t pair[4];
};

// A row of 16-bit queries in shared memory, by the four lanes of a quad: lane t has dims 8 t .. 8 t + 7 of each box.
class RawQueryRow {
 public:
  // Of row `row`; `stages` are the addresses of its two.
  __device__ RawQueryRow(const uint8_t* first, const uint8_t* second, int row)
      : stages_{first + place(row), second + place(row)} {}

  __device__ QueryChunk chunk(int half, int box) const {
    const uint4 x = *reinterpret_cast<const uint4*>((half == 0 ? stages_[0] : stages_[1]) + box * kQueryBoxBytes);
    return {x.x, x.y, x.z, x.w};
  }

  // The bits of the largest magnitude of the row; a NaN is larger than all.
  __device__ uint32_t largest() const {
    uint32_t top = 0;
#pragma unroll 1
    for (int half = 0; half < kQueryStages; ++half) {
#pragma unroll 3
      for (int box = 0; box < kQueryBoxes; ++box) {
        const QueryChunk x = chunk(half, box);
#pragma unroll
        for (int i = 0; i < 4; ++i) top = __vmaxu2(top, x.pair[i] & 0x7fff7fffu);
      }
    }
    top = __vmaxu2(top, __shfl_xor_sync(0xffffffffu, top, 1));
    top = __vmaxu2(top, __shfl_xor_sync(0xffffffffu, top, 2));
    return max(top & 0xffffu, top >> 16);
  }

 private:
  __device__ static int place(int row) { return row * 64 + threadIdx.x % 4 * 16; }
  const uint8_t* const stages_[kQueryStages];
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
