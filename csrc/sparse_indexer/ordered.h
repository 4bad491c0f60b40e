#pragma once
#include <cstdint>

#include "core/types.h"

namespace attnops::sparse_indexer {

// A float as an integer that grows with it: -0 is 0, and NaN is below everything. No float gives 0.
// Static, since files for several instruction sets have it.
ATTNOPS_HOST_DEVICE static inline uint32_t ordered(float x) {
  const float sum = x + 0.f;  // -0 becomes 0
#if defined(__CUDA_ARCH__)
  const uint32_t bits = __float_as_uint(sum);
#else
  const uint32_t bits = __builtin_bit_cast(uint32_t, sum);
#endif
  const uint32_t flip = static_cast<uint32_t>(static_cast<int32_t>(bits) >> 31) | 0x80000000u;
  return (bits & 0x7FFFFFFFu) > 0x7F800000u ? 1 : bits ^ flip;
}

}  // namespace attnops::sparse_indexer
