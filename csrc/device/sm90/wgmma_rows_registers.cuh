#pragma once
#include "device/sm90/wgmma_rows.cuh"

// The products of wgmma_rows.cuh with `a` in registers: rows lane / 4 and + 8 of the warp's sixteen, k 2 (lane % 4) and
// + 8, two neighbouring k each. They stay untouched until a wait says that the product is over.
namespace attnops::sm90 {

#define ATTNOPS_WGMMA_ROWS_RS(n, types, outputs, registers, a0, a1, a2, a3, b_at, p_at, tb_at)                       \
  asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, " p_at                                                              \
               ", 0;\n"                                                                                              \
               "wgmma.mma_async.sync.aligned.m64n" n "k16.f32." types " " registers ", {" a0 ", " a1 ", " a2 ", " a3 \
               "}, " b_at ", p, 1, 1, " tb_at ";\n}\n"                                                               \
               : outputs                                                                                             \
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(accumulate), "n"(kBMnMajor))

// d [64, 2 * kCount] (+)= a b, fp16. `accumulate` 0 overwrites d.
template <int kBMnMajor, int kCount>
__device__ __forceinline__ void wgmma_rows(float (&d)[kCount], const uint32_t (&a)[4], uint64_t b, int accumulate) {
  if constexpr (kCount == 4) {
    ATTNOPS_WGMMA_ROWS_RS("8", "f16.f16", ATTNOPS_F4(d, 0), ATTNOPS_D4, "%4", "%5", "%6", "%7", "%8", "%9", "%10");
  } else if constexpr (kCount == 8) {
    ATTNOPS_WGMMA_ROWS_RS("16", "f16.f16", ATTNOPS_F8(d), ATTNOPS_D8, "%8", "%9", "%10", "%11", "%12", "%13", "%14");
  } else if constexpr (kCount == 16) {
    ATTNOPS_WGMMA_ROWS_RS("32", "f16.f16", ATTNOPS_F16(d, 0), ATTNOPS_D16, "%16", "%17", "%18", "%19", "%20", "%21",
                          "%22");
  } else {
    static_assert(kCount == 32);
    ATTNOPS_WGMMA_ROWS_RS("64", "f16.f16", ATTNOPS_F32(d), ATTNOPS_D32, "%32", "%33", "%34", "%35", "%36", "%37",
                          "%38");
  }
}

// Numbers to one place in shared memory, four over four.
template <int kCount>
__device__ __forceinline__ void store_numbers(const float (&numbers)[kCount], uint32_t to) {
#pragma unroll
  for (int i = 0; i < kCount; i += 4) {
    asm volatile("st.shared.v4.f32 [%0], {%1, %2, %3, %4};" ::"r"(to), "f"(numbers[i]), "f"(numbers[i + 1]),
                 "f"(numbers[i + 2]), "f"(numbers[i + 3])
                 : "memory");
  }
}

// d [64, 64] (+)= a b in 16-bit elements.
template <typename T, int kBMnMajor>
__device__ __forceinline__ void wgmma_rows(float (&d)[32], const uint32_t (&a)[4], uint64_t b, int accumulate) {
  if constexpr (std::is_same_v<T, __half>) {
    ATTNOPS_WGMMA_ROWS_RS("64", "f16.f16", ATTNOPS_F32(d), ATTNOPS_D32, "%32", "%33", "%34", "%35", "%36", "%37",
                          "%38");
  } else {
    ATTNOPS_WGMMA_ROWS_RS("64", "bf16.bf16", ATTNOPS_F32(d), ATTNOPS_D32, "%32", "%33", "%34", "%35", "%36", "%37",
                          "%38");
  }
}

}  // namespace attnops::sm90
