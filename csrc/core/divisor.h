#pragma once
#include <cstdint>

#include "core/types.h"

namespace attnops {

// Division of a non-negative int by a number that is known before the launch: one wide product and a shift.
struct Divisor {
  uint32_t factor = 1;
  int shift = 0;

  Divisor() = default;
  explicit Divisor(int divisor) {
    while ((int64_t{1} << shift) < divisor) ++shift;
    shift += 31;  // factor = ceil(2^shift / divisor) is then below 2^32, and exact for dividends below 2^31
    factor = static_cast<uint32_t>(((uint64_t{1} << shift) + divisor - 1) / divisor);
  }
  ATTNOPS_HOST_DEVICE int divide(int dividend) const {
    return static_cast<int>(static_cast<uint64_t>(static_cast<uint32_t>(dividend)) * factor >> shift);
  }
};

}  // namespace attnops
