#pragma once
#include <cuda_fp8.h>

#include <type_traits>

#include "device/sm80/mma.cuh"

// Rows of FP8 elements on their way to products of 16-bit ones.
namespace attnops {

// 8 bytes from global to shared memory; else as cp_async_16, past L1 by no variant of the instruction.
__device__ __forceinline__ void cp_async_8(uint32_t destination, const void* source, bool take) {
  const int bytes = take ? 8 : 0;
  asm volatile("cp.async.ca.shared.global.L2::128B [%0], [%1], 8, %2;\n" ::"r"(destination), "l"(source), "r"(bytes)
               : "memory");
}

// As e4m3x4_to_half. An e5m2 is the upper half of an fp16.
__device__ __forceinline__ void e5m2x4_to_half(uint32_t bytes, uint32_t& low, uint32_t& high) {
  low = __byte_perm(bytes, 0, 0x1404);
  high = __byte_perm(bytes, 0, 0x3424);
}

template <typename Fp8>
__device__ __forceinline__ void fp8x4_to_half(uint32_t bytes, uint32_t& low, uint32_t& high) {
  if constexpr (std::is_same_v<Fp8, __nv_fp8_e5m2>) {
    e5m2x4_to_half(bytes, low, high);
  } else {
    e4m3x4_to_half(bytes, low, high);
  }
}

// Eight elements as eight of T. Every FP8 value is exact in fp16 and bf16, but NaN of e4m3 before sm_89.
template <typename T>
__device__ __forceinline__ uint4 widen(bool is_e5m2, uint2 bytes) {
  uint32_t wide[4];
  if (is_e5m2) {
    e5m2x4_to_half(bytes.x, wide[0], wide[1]);
    e5m2x4_to_half(bytes.y, wide[2], wide[3]);
  } else {
    e4m3x4_to_half(bytes.x, wide[0], wide[1]);
    e4m3x4_to_half(bytes.y, wide[2], wide[3]);
  }
  if constexpr (std::is_same_v<T, __nv_bfloat16>) {
#pragma unroll
    for (uint32_t& pair : wide) {
      const float2 values = __half22float2(reinterpret_cast<const __half2&>(pair));
      pair = pack2<__nv_bfloat16>(values.x, values.y);
    }
  }
  return {wide[0], wide[1], wide[2], wide[3]};
}

}  // namespace attnops
