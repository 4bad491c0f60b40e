#pragma once
#include <cstdint>
#include <type_traits>

#include "device/sm90/wgmma.cuh"

// What only this kernel does with words, barriers and operands.
namespace attnops::mla_decode::sm90::ring {

// 2^-shift, 0 from 127 on.
__device__ inline float power_of_half(int shift) { return __int_as_float((127 - shift) << 23); }

// As a word from the start: the compiler takes what the headers' conversions return apart and together again.
template <typename T>
__device__ inline uint32_t round_pair(float low, float high) {
  uint32_t pair;
  if constexpr (std::is_same_v<T, __half>) {
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
  } else {
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
  }
  return pair;
}

// A value that is the same in all lanes, where the compiler would not see it: descriptors then stay in uniform
// registers.
__device__ inline uint32_t uniform(uint32_t x) {
  asm volatile("redux.sync.max.u32 %0, %0, 0xffffffff;" : "+r"(x));
  return x;
}

// The same descriptor, for all lanes to see.
__device__ inline uint64_t uniform(uint64_t descriptor) {
  return descriptor >> 32 << 32 | uniform(static_cast<uint32_t>(descriptor));
}

// 64 x 16 elements in 8 x 8 blocks of 128 bytes, a row's two blocks side by side, no swizzle.
__device__ inline uint64_t block_descriptor(uint32_t address) {
  constexpr uint64_t kLeading = uint64_t{128 >> 4} << 16, kStride = uint64_t{256 >> 4} << 32;
  return kStride | kLeading | ((address & 0x3FFFF) >> 4);
}

}  // namespace attnops::mla_decode::sm90::ring
