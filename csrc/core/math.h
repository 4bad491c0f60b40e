#pragma once
#include <cstdint>

#include "core/types.h"

namespace attnops {

inline constexpr float kLog2e = 1.4426950408889634f;
inline constexpr float kLn2 = 0.6931471805599453f;

template <typename T>
ATTNOPS_HOST_DEVICE constexpr T ceil_div(T a, T b) {
  return (a + b - 1) / b;
}

template <typename T>
ATTNOPS_HOST_DEVICE constexpr T round_up(T a, T b) {
  return ceil_div(a, b) * b;
}

// std::min and std::max are not callable from device code without extra compiler flags.
template <typename T>
ATTNOPS_HOST_DEVICE constexpr T min_of(T a, T b) {
  return b < a ? b : a;
}

template <typename T>
ATTNOPS_HOST_DEVICE constexpr T max_of(T a, T b) {
  return a < b ? b : a;
}

}  // namespace attnops
