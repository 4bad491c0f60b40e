#pragma once
#include <type_traits>

#include "core/math.h"
#include "device/sm80/mma.cuh"
#include "device/sm90/copy.cuh"
#include "device/sm90/wgmma.cuh"
#include "fmha/sm90/row_units.h"

namespace attnops::fmha::sm90 {

namespace hopper = attnops::sm90;

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

// The same for rows as wide as the tile (kWhole), or for others, whose last columns become zeros.
template <class Tr, int kChunks, bool kNarrow, bool kWhole>
__device__ __forceinline__ void copy_rows(const char* source, uint32_t unit, uint32_t looked_up, int head_dim,
                                          uint32_t own, int number, int group) {
  constexpr int kBytes = kNarrow ? 8 : 16, kPasses = Tr::kKeys / kRowsOfPass, kAtOnce = kNarrow ? 1 : 4;
#pragma unroll
  for (int first = 0; first < kPasses; first += kAtOnce) {
    uint32_t place[kAtOnce];
#pragma unroll
    for (int i = 0; i < kAtOnce && first + i < kPasses; ++i) {
      place[i] = __shfl_sync(0xffffffffu, looked_up, 4 * (first + i) + group);
    }
#pragma unroll
    for (int i = 0; i < kAtOnce && first + i < kPasses; ++i) {
      const char* const from = source + uint64_t{place[i]} * unit;  // not read where no row is
#pragma unroll
      for (int c = 0; c < kChunks; ++c) {
        const uint32_t to = own + (first + i) * kRowsOfPass * 128 + c * Tr::kKeys * 128;
        const bool exists = place[i] != kNobody && (kWhole || (c * 8 + number) * 8 < head_dim);
        if constexpr (kNarrow) {
          hopper::copy8(to, from + c * 8 * kBytes, exists);
        } else {
          hopper::copy16(to, from + c * 8 * kBytes, exists);
        }
      }
    }
  }
}

// Begins to copy this lane's pieces of a tile: 16-bit rows, or e4m3 rows that `widen_pieces` finishes. Eight e4m3 lie
// at the place of the eight wide values that the same lane makes of them. Several rows are asked of other lanes before
// any is copied: a lane would wait for each, and for the copies before it to read their addresses.
template <class Tr, int kChunks, bool kNarrow>
__device__ __forceinline__ void copy_pieces(const void* pool, uint32_t unit, uint32_t looked_up, int head_dim,
                                            uint32_t tile, const PieceOfRow& piece) {
  // Kernels that would spill make lanes and addresses anew for each tile, by a few instructions.
  constexpr bool kAnew = Tr::kShort || Tr::kHeadDimV > 128;
  int number = piece.number, group = piece.group;
  if constexpr (kAnew) asm volatile("" : "+r"(number), "+r"(group));
  const char* source = static_cast<const char*>(pool) + number * (kNarrow ? 8 : 16);
  asm volatile("" : "+l"(source));  // one addend of all addresses
  const uint32_t own = tile + piece.byte;
  if (kAnew && !kNarrow && head_dim == 64 * kChunks) {
    copy_rows<Tr, kChunks, kNarrow, true>(source, unit, looked_up, head_dim, own, number, group);
  } else {
    copy_rows<Tr, kChunks, kNarrow, false>(source, unit, looked_up, head_dim, own, number, group);
  }
}

// Every e4m3 value is exact in fp16 and bf16; scales are the softmax's and the epilogue's.
template <typename T>
__device__ __forceinline__ void widen(uint32_t (&raw)[2], uint32_t (&wide)[4]) {
  e4m3x4_to_half(raw[0], wide[0], wide[1]);
  e4m3x4_to_half(raw[1], wide[2], wide[3]);
  if constexpr (std::is_same_v<T, __nv_bfloat16>) {
#pragma unroll
    for (uint32_t& pair : wide) {
      const float2 values = __half22float2(reinterpret_cast<const __half2&>(pair));
      pair = pack2<__nv_bfloat16>(values.x, values.y);
    }
  }
}

// Makes wide values of this lane's pieces of a tile. Several are read before the first is stored: one by one, each
// costs some 150 cycles of waiting.
template <class Tr, int kChunks>
__device__ __forceinline__ void widen_pieces(uint32_t tile, const PieceOfRow& piece) {
  constexpr int kPasses = kChunks < 4 ? 4 / kChunks : 1, kAtOnce = kPasses * kChunks;
  static_assert(Tr::kKeys % (kRowsOfPass * kPasses) == 0);
  uint32_t own = tile + piece.byte;
#pragma unroll 1
  for (int i = 0; i < Tr::kKeys / (kRowsOfPass * kPasses); ++i) {
    uint32_t raw[kAtOnce][2];
    const auto at = [own](int j) { return own + j / kChunks * kRowsOfPass * 128 + j % kChunks * Tr::kKeys * 128; };
#pragma unroll
    for (int j = 0; j < kAtOnce; ++j) {
      asm volatile("ld.shared.v2.b32 {%0, %1}, [%2];" : "=r"(raw[j][0]), "=r"(raw[j][1]) : "r"(at(j)) : "memory");
    }
    __syncwarp();  // no load sinks below
#pragma unroll
    for (int j = 0; j < kAtOnce; ++j) {
      uint32_t wide[4];
      widen<typename Tr::T>(raw[j], wide);
      asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};" ::"r"(at(j)), "r"(wide[0]), "r"(wide[1]), "r"(wide[2]),
                   "r"(wide[3])
                   : "memory");
    }
    own += kPasses * kRowsOfPass * 128;
  }
}

}  // namespace attnops::fmha::sm90
