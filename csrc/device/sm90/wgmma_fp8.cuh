#pragma once
#include <cstdint>

#include "device/sm90/wgmma.cuh"

// Warpgroup products of e4m3 operands, m = 64, n = 64 or 128, k = 32, with float32 accumulators. Operands are K-major:
// rows of 128 bytes under the 128-byte swizzle as device/sm90/wgmma.cuh describes, so a step of k = 32 is kStepKMajor,
// too.
//
// The units keep some 13 bits below the largest addend when they accumulate.
namespace attnops::sm90 {

// Descriptor of a K-major operand in rows of 64 bytes under the 64-byte swizzle, from the low word as uniform_operand
// makes it; chunk c of row r lies at r * 64 + ((c ^ (r / 2 & 3)) << 4) of a place that starts on 512 bytes.
__device__ inline uint64_t half_row_descriptor(uint32_t operand) {
  constexpr uint32_t kHigh = 2u << 30 | 512 >> 4;
  uint64_t descriptor;
  asm("mov.b64 %0, {%1, %2};" : "=l"(descriptor) : "r"(operand), "n"(kHigh));
  return descriptor;
}

// d [64, 64] (+)= a b^T, both in shared memory. `accumulate` 0 overwrites d.
__device__ inline void wgmma_e4m3(float (&d)[32], uint64_t a, uint64_t b, int accumulate) {
  asm volatile(
      "{\n.reg .pred p;\nsetp.ne.b32 p, %34, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n64k32.f32.e4m3.e4m3 " ATTNOPS_D32 ", %32, %33, p, 1, 1;\n}\n"
      : ATTNOPS_F32(d)
      : "l"(a), "l"(b), "r"(accumulate));
}

#define ATTNOPS_D64                                                                                                 \
  "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23, " \
  "%24, %25, %26, %27, %28, %29, %30, %31, %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, "  \
  "%46, %47, %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63}"

// d [64, 128] likewise.
__device__ inline void wgmma_e4m3(float (&d)[64], uint64_t a, uint64_t b, int accumulate) {
  asm volatile(
      "{\n.reg .pred p;\nsetp.ne.b32 p, %66, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n128k32.f32.e4m3.e4m3 " ATTNOPS_D64 ", %64, %65, p, 1, 1;\n}\n"
      : ATTNOPS_F16(d, 0), ATTNOPS_F16(d, 16), ATTNOPS_F16(d, 32), ATTNOPS_F16(d, 48)
      : "l"(a), "l"(b), "r"(accumulate));
}

// d [64, 64] with a in registers: rows lane / 4 and + 8 of the warp's sixteen, bytes 4 (lane % 4) .. + 3 and + 16.
__device__ inline void wgmma_e4m3(float (&d)[32], const uint32_t (&a)[4], uint64_t b, int accumulate) {
  asm volatile(
      "{\n.reg .pred p;\nsetp.ne.b32 p, %37, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n64k32.f32.e4m3.e4m3 " ATTNOPS_D32 ", {%32, %33, %34, %35}, %36, p, 1, 1;\n}\n"
      : ATTNOPS_F32(d)
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(accumulate));
}

// Two floats as two e4m3, rounded to nearest, the first in the low byte; beyond 448 they saturate.
__device__ inline uint32_t pack_e4m3(float low, float high) {
  uint16_t pair;
  asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(pair) : "f"(high), "f"(low));
  return pair;
}

// Four 8 x 8 matrices of 16-bit elements, transposed.
__device__ inline void load_transposed(uint32_t (&r)[4], uint32_t address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(address)
               : "memory");
}

}  // namespace attnops::sm90
