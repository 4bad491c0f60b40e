#pragma once
#include <bit>
#include <cstdint>

#include "core/types.h"

// Scalar element types of the CPU kernels and their conversion to and from float. Everything rounds to nearest even.
namespace attnops::cpu {

struct BFloat16 {
  uint16_t bits;
};

struct Float16 {
  _Float16 value;
};

struct Float8E4M3 {
  uint8_t bits;
};

struct Float8E5M2 {
  uint8_t bits;
};

inline float to_float(float x) { return x; }
inline float to_float(Float16 x) { return static_cast<float>(x.value); }
inline float to_float(BFloat16 x) { return std::bit_cast<float>(static_cast<uint32_t>(x.bits) << 16); }

// e4m3fn: 4 exponent bits with bias 7, no infinities, one NaN per sign. Subnormals are whole multiples of 2^-9; no step
// passes through a denormal float, which a thread that flushes them (torch.set_flush_denormal) would lose.
inline float to_float(Float8E4M3 x) {
  const uint32_t magnitude = x.bits & 0x7F;
  const uint32_t sign = static_cast<uint32_t>(x.bits & 0x80) << 24;
  if (magnitude == 0x7F) return std::bit_cast<float>(sign | 0x7FC00000u);
  const float value = magnitude < 8 ? static_cast<float>(magnitude) * 0x1p-9f
                                    : std::bit_cast<float>((magnitude << 20) + ((127u - 7u) << 23));
  return std::bit_cast<float>(std::bit_cast<uint32_t>(value) | sign);
}

// The upper half of a float16.
inline float to_float(Float8E5M2 x) {
  return static_cast<float>(std::bit_cast<_Float16>(static_cast<uint16_t>(x.bits << 8)));
}

template <typename T>
T from_float(float x);

template <>
inline float from_float<float>(float x) {
  return x;
}

template <>
inline Float16 from_float<Float16>(float x) {
  return {static_cast<_Float16>(x)};
}

template <>
inline BFloat16 from_float<BFloat16>(float x) {
  const uint32_t bits = std::bit_cast<uint32_t>(x);
  if ((bits & 0x7FFFFFFFu) > 0x7F800000u) return {static_cast<uint16_t>((bits >> 16) | 0x40)};  // keep NaN a NaN
  return {static_cast<uint16_t>((bits + 0x7FFFu + ((bits >> 16) & 1)) >> 16)};
}

// Values beyond 448 saturate, as in the "satfinite" conversion of GPUs; NaN stays NaN. Selects instead of
// branches that random data would mispredict.
template <>
inline Float8E4M3 from_float<Float8E4M3>(float x) {
  const int32_t bits = std::bit_cast<int32_t>(x);
  const int32_t magnitude = bits & 0x7FFFFFFF;
  const uint32_t halfway = static_cast<uint32_t>(magnitude) + 0x7FFFF + ((magnitude >> 20) & 1);  // NaN beyond int32_t
  const int32_t normal = static_cast<int32_t>(halfway >> 20) - ((127 - 7) << 3);
  // Subnormal: adding 2^14 aligns the lowest kept bit (2^-9) with the float's last one, and the FPU rounds to even.
  const int32_t subnormal = std::bit_cast<int32_t>(std::bit_cast<float>(magnitude) + 0x1p14f) & 0xF;
  int32_t code = magnitude < std::bit_cast<int32_t>(0x1p-6f) ? subnormal : normal;
  code = magnitude >= std::bit_cast<int32_t>(464.f) ? 0x7E : code;
  code = magnitude > 0x7F800000 ? 0x7F : code;
  return {static_cast<uint8_t>(((bits >> 24) & 0x80) | code)};
}

}  // namespace attnops::cpu
