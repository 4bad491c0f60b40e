#pragma once
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>
#include <type_traits>

#include "device/sm90/wgmma.cuh"
#include "mla_decode/params.h"
#include "mla_decode/sm90/fp8/format.h"

// The way of the two FP8 formats to 16 bit.
namespace attnops::mla_decode::sm90::fp8 {

template <Format kFormat>
struct FormatTraits {
  static constexpr bool kScaled = kFormat == Format::kRow;
  static constexpr int kRopeOffset = kScaled ? 512 + 16 : 512;  // bytes from the row's beginning
  static constexpr int kRopeVecs = kScaled ? 8 : 4;             // of 16 bytes
  static constexpr int kRopePerThread = 64 * kRopeVecs / 128;   // of a tile
};

// Two e4m3 as two fp16, exactly.
__device__ inline uint32_t e4m3_to_half(uint16_t pair) {
  uint32_t halves;
  asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(halves) : "h"(pair));
  return halves;
}

// Two e4m3 times a scale as two T. Hopper knows e4m3 to fp16 only; bf16 goes by float32.
template <typename T, bool kScaled>
__device__ inline uint32_t e4m3_to(uint16_t pair, float scale) {
  const uint32_t halves = e4m3_to_half(pair);
  if constexpr (std::is_same_v<T, __half> && !kScaled) return halves;
  const float2 values = __half22float2(reinterpret_cast<const __half2&>(halves));
  if constexpr (!kScaled) return attnops::sm90::pack_pair<T>(values.x, values.y);
  return attnops::sm90::pack_pair<T>(values.x * scale, values.y * scale);
}

// Sixteen e4m3 as two vectors of eight T.
template <typename T, bool kScaled>
__device__ inline void convert16(const uint4& bytes, float scale, uint4& low, uint4& high) {
  const auto pair = [&](uint32_t word, int i) {
    return e4m3_to<T, kScaled>(static_cast<uint16_t>(i ? word >> 16 : word), scale);
  };
  low = {pair(bytes.x, 0), pair(bytes.x, 1), pair(bytes.y, 0), pair(bytes.y, 1)};
  high = {pair(bytes.z, 0), pair(bytes.z, 1), pair(bytes.w, 0), pair(bytes.w, 1)};
}

// Eight bf16 as eight T.
template <typename T>
__device__ inline uint4 convert_rope(uint4 bits) {
  if constexpr (std::is_same_v<T, __half>) {
    uint32_t* words = reinterpret_cast<uint32_t*>(&bits);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      words[i] = attnops::sm90::pack_pair<T>(__uint_as_float(words[i] << 16), __uint_as_float(words[i] & 0xffff0000u));
    }
  }
  return bits;
}

}  // namespace attnops::mla_decode::sm90::fp8
