#pragma once
#include "device/sm90/wgmma.cuh"

// Warpgroup products with few columns: d [64, N] (+)= a b with N = 8, 16, 32 or 64 and k = 16, both operands in shared
// memory and each of either majorness. In a lane with g = lane / 4, t = lane % 4 of warp w, d[4 j + 2 h + i] is row
// 16 w + g + 8 h, column 8 j + 2 t + i.
namespace attnops::sm90 {

// Descriptor of an MN-major operand without a swizzle: groups of eight columns (m or n), each [k][8] with 16 bytes per
// k. The groups lie `group_bytes` apart.
__device__ inline uint64_t plain_descriptor(uint32_t address, int group_bytes) {
  constexpr uint64_t kLeading = uint64_t{8 * 16 >> 4} << 16;  // to the next eight k
  return static_cast<uint64_t>(group_bytes >> 4) << 32 | kLeading | ((address & 0x3FFFF) >> 4);
}
inline constexpr int kStepPlain = 16 * 16 >> 4;  // to the next k = 16

#define ATTNOPS_F8(d) ATTNOPS_F4(d, 0), ATTNOPS_F4(d, 4)
#define ATTNOPS_D4 "{%0, %1, %2, %3}"
#define ATTNOPS_D8 "{%0, %1, %2, %3, %4, %5, %6, %7}"
#define ATTNOPS_D16 "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15}"
#define ATTNOPS_WGMMA_ROWS(n, types, outputs, registers, a_at, b_at, p_at, ta_at, tb_at)                \
  asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, " p_at                                                 \
               ", 0;\n"                                                                                 \
               "wgmma.mma_async.sync.aligned.m64n" n "k16.f32." types " " registers ", " a_at ", " b_at \
               ", p, 1, 1, " ta_at ", " tb_at ";\n}\n"                                                  \
               : outputs                                                                                \
               : "l"(a), "l"(b), "r"(accumulate), "n"(kAMnMajor), "n"(kBMnMajor))

#define ATTNOPS_WGMMA_ROWS_OF(types)                                                                    \
  if constexpr (kCount == 4) {                                                                          \
    ATTNOPS_WGMMA_ROWS("8", types, ATTNOPS_F4(d, 0), ATTNOPS_D4, "%4", "%5", "%6", "%7", "%8");         \
  } else if constexpr (kCount == 8) {                                                                   \
    ATTNOPS_WGMMA_ROWS("16", types, ATTNOPS_F8(d), ATTNOPS_D8, "%8", "%9", "%10", "%11", "%12");        \
  } else if constexpr (kCount == 16) {                                                                  \
    ATTNOPS_WGMMA_ROWS("32", types, ATTNOPS_F16(d, 0), ATTNOPS_D16, "%16", "%17", "%18", "%19", "%20"); \
  } else {                                                                                              \
    static_assert(kCount == 32);                                                                        \
    ATTNOPS_WGMMA_ROWS("64", types, ATTNOPS_F32(d), ATTNOPS_D32, "%32", "%33", "%34", "%35", "%36");    \
  }

// N = 2 * kCount columns. `accumulate` 0 overwrites d.
template <typename T, int kAMnMajor, int kBMnMajor, int kCount>
__device__ __forceinline__ void wgmma_rows(float (&d)[kCount], uint64_t a, uint64_t b, int accumulate) {
  if constexpr (std::is_same_v<T, __half>) {
    ATTNOPS_WGMMA_ROWS_OF("f16.f16")
  } else {
    ATTNOPS_WGMMA_ROWS_OF("bf16.bf16")
  }
}

}  // namespace attnops::sm90
