#pragma once
#include "device/sm90/wgmma_rows.cuh"

// The products of wgmma_rows.cuh with `a` in registers: rows lane / 4 and + 8 of the warp's sixteen, k 2 (lane % 4) and
// + 8, two neighbouring k each. They stay untouched until a wait says that the product is over.
namespace attnops::sm90 {

#define ATTNOPS_WGMMA_ROWS_RS(n, outputs, registers, a0, a1, a2, a3, b_at, p_at, tb_at)                            \
  asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, " p_at                                                            \
               ", 0;\n"                                                                                            \
               "wgmma.mma_async.sync.aligned.m64n" n "k16.f32.f16.f16 " registers ", {" a0 ", " a1 ", " a2 ", " a3 \
               "}, " b_at ", p, 1, 1, " tb_at ";\n}\n"                                                             \
               : outputs                                                                                           \
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(accumulate), "n"(kBMnMajor))

// d [64, 2 * kCount] (+)= a b, fp16. `accumulate` 0 overwrites d.
template <int kBMnMajor, int kCount>
__device__ __forceinline__ void wgmma_rows(float (&d)[kCount], const uint32_t (&a)[4], uint64_t b, int accumulate) {
  if constexpr (kCount == 4) {
    ATTNOPS_WGMMA_ROWS_RS("8", ATTNOPS_F4(d, 0), ATTNOPS_D4, "%4", "%5", "%6", "%7", "%8", "%9", "%10");
  } else {
    static_assert(kCount == 8);
    ATTNOPS_WGMMA_ROWS_RS("16", ATTNOPS_F8(d), ATTNOPS_D8, "%8", "%9", "%10", "%11", "%12", "%13", "%14");
  }
}

}  // namespace attnops::sm90
