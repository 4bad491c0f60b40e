#pragma once
#include "cpu/convert.h"

// Stores alone make e5m2, so this stands apart from what every kernel includes.
namespace attnops::cpu {

// As e4m3: values beyond 57344 saturate, and NaN stays NaN. The lowest bit of subnormals is 2^-16.
template <>
inline Float8E5M2 from_float<Float8E5M2>(float x) {
  const int32_t bits = std::bit_cast<int32_t>(x);
  const int32_t magnitude = bits & 0x7FFFFFFF;
  const uint32_t halfway = static_cast<uint32_t>(magnitude) + 0xFFFFF + ((magnitude >> 21) & 1);  // NaN beyond int32_t
  const int32_t normal = static_cast<int32_t>(halfway >> 21) - ((127 - 15) << 2);
  const int32_t subnormal = std::bit_cast<int32_t>(std::bit_cast<float>(magnitude) + 0x1p7f) & 0x7;
  int32_t code = magnitude < std::bit_cast<int32_t>(0x1p-14f) ? subnormal : normal;
  code = magnitude >= std::bit_cast<int32_t>(61440.f) ? 0x7B : code;
  code = magnitude > 0x7F800000 ? 0x7F : code;
  return {static_cast<uint8_t>(((bits >> 24) & 0x80) | code)};
}

}  // namespace attnops::cpu
