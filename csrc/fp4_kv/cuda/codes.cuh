#pragma once
#include <cuda_fp16.h>
#include <cuda_fp8.h>

#include <cstdint>

// Codes of four bits to fp16, exactly: a sign, two exponent bits and one of mantissa stand in an fp16 as they are,
// which is the value times 2^-14. A block's scale follows. Their products are exact: multiples of 2^-24 of six bits.
namespace attnops::fp4_kv {

inline constexpr float kUnit = 16384.f;  // what dequantized values are to be multiplied by

// Codes i and i + 4 of eight as pair i, times 2^-14. First they become the upper bytes of fp16, four at a time.
__device__ __forceinline__ void code_pairs(uint32_t codes, uint32_t (&pairs)[4]) {
  constexpr uint32_t kSigns = 0x80808080u, kSizes = 0x0E0E0E0Eu, kUpper = 0xFF00FF00u;
  const uint32_t even = (codes << 4 & kSigns) | (codes << 1 & kSizes);
  const uint32_t odd = (codes & kSigns) | (codes >> 3 & kSizes);
  pairs[0] = __byte_perm(even, 0, 0x2404), pairs[1] = __byte_perm(odd, 0, 0x2404);
  pairs[2] = even & kUpper, pairs[3] = odd & kUpper;
}

__device__ __forceinline__ uint32_t times(uint32_t pair, __half2 scale) {
  const __half2 product = __hmul2(*reinterpret_cast<const __half2*>(&pair), scale);
  return *reinterpret_cast<const uint32_t*>(&product);
}

// Two e4m3 scales.
__device__ __forceinline__ __half2 scale_pair(uint32_t bytes) {
  return __half2(__nv_cvt_fp8x2_to_halfraw2(static_cast<__nv_fp8x2_storage_t>(bytes), __NV_E4M3));
}

}  // namespace attnops::fp4_kv
