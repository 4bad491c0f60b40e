#pragma once
#include <type_traits>
#include <utility>

#include "core/math.h"
#include "device/sm80/mma.cuh"
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

// 16 or 8 bytes; zeros, and nothing is read, unless `there` has the bit. The test is of the bit where it lies: what
// shifts it takes registers that an earlier copy's address has not left yet.
template <int kBytes, uint32_t kBit>
__device__ __forceinline__ void copy_where(uint32_t shared, const void* global, uint32_t there) {
  static_assert(kBytes == 16 || kBytes == 8);
  if constexpr (kBytes == 16) {
    asm volatile(
        "{\n"
        ".reg .pred p;\n"
        ".reg .b32 n;\n"
        "and.b32 n, %2, %3;\n"
        "setp.ne.b32 p, n, 0;\n"
        "selp.b32 n, 16, 0, p;\n"
        "cp.async.cg.shared.global.L2::128B [%0], [%1], 16, n;\n"
        "}\n" ::"r"(shared),
        "l"(global), "r"(there), "n"(kBit)
        : "memory");
  } else {
    asm volatile(
        "{\n"
        ".reg .pred p;\n"
        ".reg .b32 n;\n"
        "and.b32 n, %2, %3;\n"
        "setp.ne.b32 p, n, 0;\n"
        "selp.b32 n, 8, 0, p;\n"
        "cp.async.ca.shared.global [%0], [%1], 8, n;\n"
        "}\n" ::"r"(shared),
        "l"(global), "r"(there), "n"(kBit)
        : "memory");
  }
}

// Where this lane's pieces of some passes come from. Known before their place is free: a copy reads its address late,
// so copies whose addresses take turns in one register wait for each other.
template <int kPasses>
struct PieceSources {
  const char* from[kPasses];
  uint32_t there = 0;  // bit 4 i: pass i

  // kBytes: of a piece. `first`: of the passes.
  template <int kBytes>
  __device__ __forceinline__ void look_up(const void* pool, int64_t looked_up, int first, const PieceOfRow& piece) {
    const char* const source = static_cast<const char*>(pool) + piece.number * kBytes;
    there = __ballot_sync(0xffffffffu, looked_up >= 0) >> (4 * first + piece.group);
#pragma unroll
    for (int i = 0; i < kPasses; ++i) {
      const int64_t offset = __shfl_sync(0xffffffffu, looked_up, 4 * (first + i) + piece.group);
      from[i] = source + offset;  // not read where no row is
    }
  }
};

// Begins to copy this lane's pieces of them: 16-bit rows, or e4m3 rows that `widen_pieces` finishes. Eight e4m3 lie at
// the place of the eight wide values that the same lane makes of them.
template <class Tr, int kChunks, bool kNarrow, int kPasses>
__device__ __forceinline__ void copy_pieces(const PieceSources<kPasses>& sources, int first, int head_dim,
                                            uint32_t tile, const PieceOfRow& piece) {
  constexpr int kBytes = kNarrow ? 8 : 16;
  uint32_t there[kChunks];
#pragma unroll
  for (int c = 0; c < kChunks; ++c) there[c] = (c * 8 + piece.number) * 8 < head_dim ? sources.there : 0;
  const uint32_t own = tile + piece.byte + first * kRowsOfPass * 128;
  const auto copy_pass = [&](auto pass) {
    constexpr int kPass = decltype(pass)::value;
#pragma unroll
    for (int c = 0; c < kChunks; ++c) {
      copy_where<kBytes, 1u << 4 * kPass>(own + kPass * kRowsOfPass * 128 + c * Tr::kKeys * 128,
                                          sources.from[kPass] + c * 8 * kBytes, there[c]);
    }
  };
  [&]<int... kPass>(std::integer_sequence<int, kPass...>) {
    (copy_pass(std::integral_constant<int, kPass>{}), ...);
  }(std::make_integer_sequence<int, kPasses>{});
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
