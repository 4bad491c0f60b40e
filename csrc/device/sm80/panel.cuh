#pragma once
#include "device/sm80/cp_async.cuh"
#include "device/sm80/mma.cuh"

// Panels of 64 16-bit columns: rows of 128 bytes whose 16-byte chunks are permuted by the row's last three bits. Eight
// rows of a chunk lie in different banks. It is the order of Hopper's 128-byte swizzle.
namespace attnops {

__device__ __forceinline__ uint32_t panel_at(int row, int chunk) {
  return static_cast<uint32_t>(row * 128 + ((chunk ^ (row & 7)) << 4));
}

// The A fragment of rows [row, row + 16) and columns [16 step, 16 step + 16).
__device__ __forceinline__ void load_a(uint32_t (&a)[4], uint32_t panel, int row, int step) {
  const int lane = threadIdx.x % 32;
  ldmatrix_x4(a, panel + panel_at(row + lane % 16, 2 * step + lane / 16));
}

// B fragments of 16 columns n and 16 k, where the panel's rows are n: {b0, b1} of columns 0 to 7, then of 8 to 15.
__device__ __forceinline__ void load_b(uint32_t (&b)[4], uint32_t panel, int n, int step) {
  const int lane = threadIdx.x % 32;
  ldmatrix_x4(b, panel + panel_at(n + lane / 16 * 8 + lane % 8, 2 * step + lane / 8 % 2));
}

// The same where the panel's rows are k.
__device__ __forceinline__ void load_b_trans(uint32_t (&b)[4], uint32_t panel, int k, int n) {
  const int lane = threadIdx.x % 32;
  ldmatrix_x4_trans(b, panel + panel_at(k + lane / 8 % 2 * 8 + lane % 8, n / 8 + lane / 16));
}

// The transpose of rows [row, row + 16) and columns [8 chunk, 8 chunk + 16), in the order of accumulators: {columns 0
// to 7, 8 to 15} of rows 0 to 7, then of rows 8 to 15.
__device__ __forceinline__ void load_transposed(uint32_t (&c)[4], uint32_t panel, int row, int chunk) {
  const int lane = threadIdx.x % 32;
  ldmatrix_x4_trans(c, panel + panel_at(row + lane / 16 * 8 + lane % 8, chunk + lane / 8 % 2));
}

}  // namespace attnops
