#pragma once
#include "core/math.h"
#include "device/sm90/copy.cuh"
#include "device/sm90/wgmma.cuh"

namespace attnops::fmha::sm90 {

namespace hopper = attnops::sm90;

// Byte offset of a key's row from the pool, of its head; negative: no row of the tile sees the key, or its page is
// outside the pool. Such rows become zeros.
inline constexpr int64_t kNobody = -1;

// The rows of a tile that a lane looks up: lane, 32 + lane, and so on.
template <class Tr>
struct RowOffsets {
  static constexpr int kCount = ceil_div(Tr::kKeys, 32);
  int64_t of[kCount];
};

// Begins to copy the rows of a tile, by a warp; eight lanes share a chunk of a row. The offsets of several rows are
// asked of other lanes before any is used: a warp alone would wait for each.
template <class Tr, int kChunks>
__device__ __forceinline__ void copy_rows(const void* pool, const RowOffsets<Tr>& offsets, int head_dim,
                                          uint32_t tile) {
  constexpr int kElements = 16 / sizeof(typename Tr::T), kAtOnce = 4;
  const int lane = threadIdx.x % 32, piece = lane % 8;
  const char* const source = static_cast<const char*>(pool) + piece * 16;
#pragma unroll
  for (int j = 0; j < RowOffsets<Tr>::kCount; ++j) {
    const int passes = min_of(8, Tr::kKeys / 4 - 8 * j);
#pragma unroll
    for (int first = 0; first < passes; first += kAtOnce) {
      int64_t offset[kAtOnce];
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        offset[i] = __shfl_sync(0xffffffffu, offsets.of[j], 4 * (first + i) + lane / 8);
      }
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        const uint32_t to = tile + j * 4096 + hopper::swizzled(4 * (first + i) + lane / 8, piece);
        const char* const from = source + offset[i];  // not read where no row is
#pragma unroll
        for (int c = 0; c < kChunks; ++c) {
          const bool exists = offset[i] >= 0 && (c * 8 + piece) * kElements < head_dim;
          hopper::copy16(to + c * Tr::kKeys * 128, from + c * 128, exists);
        }
      }
    }
  }
}

// Four warps bring a tile together. In pass n a lane has a piece of row 16 n + 4 warp + lane / 8, and it looks up row
// 16 (lane / 4) + 4 warp + lane % 4: no warp asks another one.
inline constexpr int kRowsOfPass = 16;

__device__ __forceinline__ int looked_up_row() {
  const int lane = threadIdx.x % 32;
  return kRowsOfPass * (lane / 4) + static_cast<int>(threadIdx.x) / 32 * 4 + lane % 4;
}

// A thread's place among those that bring a tile. The compiler cannot make it anew from the thread's number, which it
// would do for every row, waiting for that number each time.
struct PieceOfRow {
  int number;     // of 8 in a row's chunk
  int group;      // of 4 in the warp: the row of a pass
  uint32_t byte;  // of the first piece in a tile

  __device__ __forceinline__ PieceOfRow() {
    const int lane = threadIdx.x % 32;
    number = __shfl_sync(0xffffffffu, lane % 8, lane);
    group = __shfl_sync(0xffffffffu, lane / 8, lane);
    byte = __shfl_sync(0xffffffffu, hopper::swizzled(static_cast<int>(threadIdx.x) / 8, lane % 8), lane);
  }
};

// Begins to copy this lane's pieces of a tile of 16-bit rows.
template <class Tr, int kChunks>
__device__ __forceinline__ void copy_pieces(const void* pool, int64_t looked_up, int head_dim, uint32_t tile,
                                            const PieceOfRow& piece) {
  const char* const source = static_cast<const char*>(pool) + piece.number * 16;
  const uint32_t own = tile + piece.byte;
#pragma unroll
  for (int pass = 0; pass < Tr::kKeys / kRowsOfPass; ++pass) {
    const int64_t offset = __shfl_sync(0xffffffffu, looked_up, 4 * pass + piece.group);
    const char* const from = source + offset;  // not read where no row is
#pragma unroll
    for (int c = 0; c < kChunks; ++c) {
      const uint32_t to = own + pass * kRowsOfPass * 128 + c * Tr::kKeys * 128;
      const bool exists = offset >= 0 && (c * 8 + piece.number) * 8 < head_dim;
      hopper::copy16(to, from + c * 128, exists);
    }
  }
}

}  // namespace attnops::fmha::sm90
