#pragma once
#include "device/sm90/wgmma.cuh"

// Warpgroup products with few columns: m = 64, n = 16, 32 or 48, k = 16, a in shared memory or registers, b K-major.
// For kernels that put the long side, keys or columns of V, on m.
namespace attnops::sm90 {

// The low word of an operand's descriptor: its address, the same in all lanes by way of a shuffle. The compiler then
// keeps it in a uniform register, and a step to the next operand is one uniform addition, where 64-bit arithmetic per
// thread would cost more than the product.
__device__ inline uint32_t uniform_operand(uint32_t address) {
  return __shfl_sync(0xffffffffu, (address & 0x3FFFF) >> 4, 0);
}

// Descriptor of an operand under the 128-byte swizzle whose groups of eight rows lie kGroupStride bytes apart: rows are
// m or n when it is K-major, and k when it is MN-major (then of 64 elements of m or n).
template <int kGroupStride>
__device__ inline uint64_t group_descriptor(uint32_t operand) {
  constexpr uint32_t kHigh = 1u << 30 | kGroupStride >> 4;
  uint64_t descriptor;
  asm("mov.b64 %0, {%1, %2};" : "=l"(descriptor) : "r"(operand), "n"(kHigh));
  return descriptor;
}

#define ATTNOPS_R8 "%0, %1, %2, %3, %4, %5, %6, %7"
#define ATTNOPS_R16 ATTNOPS_R8 ", %8, %9, %10, %11, %12, %13, %14, %15"
#define ATTNOPS_R24 ATTNOPS_R16 ", %16, %17, %18, %19, %20, %21, %22, %23"

// a_at .. trans_at: the numbers of the operands, which follow the accumulator's.
#define ATTNOPS_WGMMA_FEW(n, types, registers, a_at, b_at, flag_at, trans_at, ...)                        \
  asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %" flag_at ", 0;\nwgmma.mma_async.sync.aligned.m64n" n   \
               "k16.f32." types " {" registers "}, %" a_at ", %" b_at ", p, 1, 1, %" trans_at ", 0;\n}\n" \
               : __VA_ARGS__                                                                              \
               : "l"(a), "l"(b), "r"(accumulate), "n"(kTransposeA))

#define ATTNOPS_WGMMA_FEW_N(types)                                                                            \
  if constexpr (kColumns == 16) {                                                                             \
    ATTNOPS_WGMMA_FEW("16", types, ATTNOPS_R8, "8", "9", "10", "11", ATTNOPS_F4(d, 0), ATTNOPS_F4(d, 4));     \
  } else if constexpr (kColumns == 32) {                                                                      \
    ATTNOPS_WGMMA_FEW("32", types, ATTNOPS_R16, "16", "17", "18", "19", ATTNOPS_F16(d, 0));                   \
  } else {                                                                                                    \
    static_assert(kColumns == 48);                                                                            \
    ATTNOPS_WGMMA_FEW("48", types, ATTNOPS_R24, "24", "25", "26", "27", ATTNOPS_F16(d, 0), ATTNOPS_F4(d, 16), \
                      ATTNOPS_F4(d, 20));                                                                     \
  }

// d [64, kColumns] (+)= a b. kTransposeA: a is MN-major. `accumulate` 0 overwrites d.
template <typename T, int kColumns, int kTransposeA>
__device__ inline void wgmma_few(float (&d)[kColumns / 2], uint64_t a, uint64_t b, int accumulate) {
  if constexpr (std::is_same_v<T, __half>) {
    ATTNOPS_WGMMA_FEW_N("f16.f16")
  } else {
    ATTNOPS_WGMMA_FEW_N("bf16.bf16")
  }
}

#define ATTNOPS_WGMMA_FEW_RS(n, types, registers, a0, a1, a2, a3, b_at, flag_at, ...)                                 \
  asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %" flag_at ", 0;\nwgmma.mma_async.sync.aligned.m64n" n               \
               "k16.f32." types " {" registers "}, {%" a0 ", %" a1 ", %" a2 ", %" a3 "}, %" b_at ", p, 1, 1, 0;\n}\n" \
               : __VA_ARGS__                                                                                          \
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(accumulate))

#define ATTNOPS_WGMMA_FEW_RS_N(types)                                                                      \
  if constexpr (kColumns == 16) {                                                                          \
    ATTNOPS_WGMMA_FEW_RS("16", types, ATTNOPS_R8, "8", "9", "10", "11", "12", "13", ATTNOPS_F4(d, 0),      \
                         ATTNOPS_F4(d, 4));                                                                \
  } else if constexpr (kColumns == 32) {                                                                   \
    ATTNOPS_WGMMA_FEW_RS("32", types, ATTNOPS_R16, "16", "17", "18", "19", "20", "21", ATTNOPS_F16(d, 0)); \
  } else {                                                                                                 \
    static_assert(kColumns == 48);                                                                         \
    ATTNOPS_WGMMA_FEW_RS("48", types, ATTNOPS_R24, "24", "25", "26", "27", "28", "29", ATTNOPS_F16(d, 0),  \
                         ATTNOPS_F4(d, 16), ATTNOPS_F4(d, 20));                                            \
  }

// The same with a in registers, also for 64 columns: rows lane / 4 and + 8 of the warp's sixteen, columns 2 (lane % 4)
// + {0, 1} and + 8.
template <typename T, int kColumns>
__device__ inline void wgmma_few(float (&d)[kColumns / 2], const uint32_t (&a)[4], uint64_t b, int accumulate) {
  if constexpr (kColumns == 64) {
    wgmma_n64<T>(d, a, b, accumulate);
  } else if constexpr (std::is_same_v<T, __half>) {
    ATTNOPS_WGMMA_FEW_RS_N("f16.f16")
  } else {
    ATTNOPS_WGMMA_FEW_RS_N("bf16.bf16")
  }
}

// 8 x 8 matrices of 16-bit elements, written transposed: lane l gives the address of row l % 8 of matrix l / 8.
__device__ inline void store_transposed(const uint32_t (&a)[2], uint32_t address) {
  asm volatile("stmatrix.sync.aligned.m8n8.x2.trans.shared.b16 [%0], {%1, %2};" ::"r"(address), "r"(a[0]), "r"(a[1])
               : "memory");
}

__device__ inline void store_transposed(const uint32_t (&a)[4], uint32_t address) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(a[0]),
               "r"(a[1]), "r"(a[2]), "r"(a[3])
               : "memory");
}

// Transposes an 8 x 8 matrix of 16-bit elements among the lanes of a warp.
__device__ inline uint32_t transpose_matrix(uint32_t a) {
  uint32_t b;
  asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(b) : "r"(a));
  return b;
}

}  // namespace attnops::sm90
