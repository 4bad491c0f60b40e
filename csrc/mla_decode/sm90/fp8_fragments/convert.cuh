#pragma once
#include <cstdint>

// e4m3 to fp16, exactly, as fragments of a product's first operand. One instruction converts two values; to bf16 there
// is none.
namespace attnops::mla_decode::sm90::fp8_fragments {

// Bytes 0 and 1, and bytes 2 and 3.
__device__ inline void convert4(uint32_t bytes, uint32_t& low, uint32_t& high) {
  asm("{\n"
      ".reg .b16 l, h;\n"
      "mov.b32 {l, h}, %2;\n"
      "cvt.rn.f16x2.e4m3x2 %0, l;\n"
      "cvt.rn.f16x2.e4m3x2 %1, h;\n"
      "}\n"
      : "=r"(low), "=r"(high)
      : "r"(bytes));
}

// 16 keys x 32 columns of K, of which the thread has bytes 4t .. 4t + 3 of rows g and g + 8, 16 columns apart, as two
// steps of 16 columns. In a step, bytes 4t and 4t + 1 stand where columns 2t and 2t + 1 belong, the others where 8 + 2t
// and 9 + 2t do: queries are stored in that order.
__device__ inline void convert_keys(const uint32_t (&r)[4], uint32_t (&a)[2][4]) {
#pragma unroll
  for (int step = 0; step < 2; ++step) {
    convert4(r[2 * step], a[step][0], a[step][2]);
    convert4(r[2 * step + 1], a[step][1], a[step][3]);
  }
}

// 32 tokens x 16 columns of V, of which a transposing load of 16-bit pairs gave the thread columns 2g and 2g + 1 of
// tokens 2t and 2t + 1, eight tokens apart, as two steps of 16 tokens of V^T: column 2g is row g, 2g + 1 row g + 8.
__device__ inline void convert_values(const uint32_t (&r)[4], uint32_t (&a)[2][4]) {
#pragma unroll
  for (int step = 0; step < 2; ++step) {
    convert4(__byte_perm(r[2 * step], 0, 0x3120), a[step][0], a[step][1]);
    convert4(__byte_perm(r[2 * step + 1], 0, 0x3120), a[step][2], a[step][3]);
  }
}

}  // namespace attnops::mla_decode::sm90::fp8_fragments
