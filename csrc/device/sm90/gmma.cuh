#pragma once
#define CUTE_SM90_EXTENDED_MMA_SHAPES_ENABLED  // widths that are no power of two
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_fp8.h>

#include <cstdint>
#include <cute/arch/mma_sm90_gmma.hpp>
#include <utility>

// Warpgroup products of any width, m = 64 and k = 16 (e4m3: 32), by CuTe's instruction wrappers: the accumulators are
// one array.
namespace attnops::sm90 {

// B in shared memory: rows are n and k is dense, or rows are k and n is dense.
inline constexpr auto kRowsAreN = cute::SM90::GMMA::Major::K;
inline constexpr auto kRowsAreK = cute::SM90::GMMA::Major::MN;

template <typename T, int kColumns, cute::SM90::GMMA::Major kMajorB>
struct Gmma;

#define ATTNOPS_GMMA(n)                                                                                      \
  template <cute::SM90::GMMA::Major kMajorB>                                                                 \
  struct Gmma<__nv_bfloat16, n, kMajorB> {                                                                   \
    using Shared = cute::SM90::GMMA::MMA_64x##n##x16_F32BF16BF16_SS<cute::SM90::GMMA::Major::K, kMajorB>;    \
    using Registers = cute::SM90::GMMA::MMA_64x##n##x16_F32BF16BF16_RS<cute::SM90::GMMA::Major::K, kMajorB>; \
  };                                                                                                         \
  template <cute::SM90::GMMA::Major kMajorB>                                                                 \
  struct Gmma<__half, n, kMajorB> {                                                                          \
    using Shared = cute::SM90::GMMA::MMA_64x##n##x16_F32F16F16_SS<cute::SM90::GMMA::Major::K, kMajorB>;      \
    using Registers = cute::SM90::GMMA::MMA_64x##n##x16_F32F16F16_RS<cute::SM90::GMMA::Major::K, kMajorB>;   \
  };
ATTNOPS_GMMA(32)
ATTNOPS_GMMA(48)
ATTNOPS_GMMA(64)
ATTNOPS_GMMA(80)
ATTNOPS_GMMA(96)
ATTNOPS_GMMA(112)
ATTNOPS_GMMA(128)
ATTNOPS_GMMA(160)
ATTNOPS_GMMA(176)
ATTNOPS_GMMA(192)
ATTNOPS_GMMA(256)
#undef ATTNOPS_GMMA

// e4m3 operands are dense in k. The units keep some 13 bits below the largest addend when they accumulate.
#define ATTNOPS_GMMA(n)                                                      \
  template <>                                                                \
  struct Gmma<__nv_fp8_e4m3, n, kRowsAreN> {                                 \
    using Shared = cute::SM90::GMMA::MMA_64x##n##x32_F32E4M3E4M3_SS_TN<>;    \
    using Registers = cute::SM90::GMMA::MMA_64x##n##x32_F32E4M3E4M3_RS_TN<>; \
  };
ATTNOPS_GMMA(64)
ATTNOPS_GMMA(96)
ATTNOPS_GMMA(128)
ATTNOPS_GMMA(192)
ATTNOPS_GMMA(256)
#undef ATTNOPS_GMMA

namespace detail {
using Scale = cute::SM90::GMMA::ScaleOut;

template <class Op, int kCount, int... kIndex>
__device__ __forceinline__ void gmma_shared(float (&d)[kCount], uint64_t a, uint64_t b, Scale scale,
                                            std::integer_sequence<int, kIndex...>) {
  Op::fma(a, b, d[kIndex]..., scale);
}

template <class Op, int kCount, int... kIndex>
__device__ __forceinline__ void gmma_registers(float (&d)[kCount], const uint32_t* a, uint64_t b, Scale scale,
                                               std::integer_sequence<int, kIndex...>) {
  Op::fma(a[0], a[1], a[2], a[3], b, d[kIndex]..., scale);
}
}  // namespace detail

// d [64, 2 * kCount] = a b, or += where `accumulate`; a in shared memory, rows are m.
template <typename T, cute::SM90::GMMA::Major kMajorB, int kCount>
__device__ __forceinline__ void gmma(float (&d)[kCount], uint64_t a, uint64_t b, bool accumulate) {
  detail::gmma_shared<typename Gmma<T, 2 * kCount, kMajorB>::Shared>(
      d, a, b, accumulate ? detail::Scale::One : detail::Scale::Zero, std::make_integer_sequence<int, kCount>());
}

// The same with a in four registers: rows lane / 4 and + 8 of the warp's sixteen, k 2 (lane % 4) + {0, 1} and + 8
// (e4m3: 4 (lane % 4) + {0, 1, 2, 3} and + 16).
template <typename T, cute::SM90::GMMA::Major kMajorB, int kCount>
__device__ __forceinline__ void gmma(float (&d)[kCount], const uint32_t* a, uint64_t b, bool accumulate) {
  detail::gmma_registers<typename Gmma<T, 2 * kCount, kMajorB>::Registers>(
      d, a, b, accumulate ? detail::Scale::One : detail::Scale::Zero, std::make_integer_sequence<int, kCount>());
}

// The low word of the descriptor of an operand of rows of 128 bytes under the 128-byte swizzle, kRows rows to a chunk
// of 64 elements: its address, and the stride to the next chunk (which only matters where rows are k). All lanes have
// the same, by way of a shuffle: the compiler then keeps it in a uniform register, and a step is one uniform addition.
template <int kRows>
__device__ __forceinline__ uint32_t chunk_operand(uint32_t address) {
  constexpr uint32_t kLeading = uint32_t{kRows * 128 >> 4} << 16;
  return __shfl_sync(0xffffffffu, kLeading | ((address & 0x3FFFF) >> 4), 0);
}

// The descriptor: groups of eight rows lie 1 KB apart, or kGroupBytes.
template <int kGroupBytes = 1024>
__device__ __forceinline__ uint64_t chunk_descriptor(uint32_t operand) {
  constexpr uint32_t kHigh = 1u << 30 | kGroupBytes >> 4;
  uint64_t descriptor;
  asm("mov.b64 %0, {%1, %2};" : "=l"(descriptor) : "r"(operand), "n"(kHigh));
  return descriptor;
}

}  // namespace attnops::sm90
