#pragma once
#include <cstdint>

#include "core/types.h"

// Token slots (page * page_size + offset) and the arrays of indices that name them.
namespace attnops {

// A 1-D array of int32 or int64; data is null where the argument is absent.
struct IndexArray {
  const void* data;
  int64_t stride, size;
  bool wide;  // int64

  ATTNOPS_HOST_DEVICE int64_t operator[](int64_t i) const {
    return wide ? static_cast<const int64_t*>(data)[i * stride] : static_cast<const int32_t*>(data)[i * stride];
  }
};

ATTNOPS_HOST_DEVICE inline int64_t page_of(int64_t slot, int page_size, int page_shift) {
  if (page_shift >= 0) return slot >> page_shift;
  if (slot <= UINT32_MAX) return static_cast<uint32_t>(slot) / static_cast<uint32_t>(page_size);  // 64 bits are slow
  return slot / page_size;
}

// log2(page_size), or -1 when it is no power of two.
inline int shift_of(int64_t page_size) {
  int shift = 0;
  while ((int64_t{1} << shift) < page_size) ++shift;
  return (int64_t{1} << shift) == page_size ? shift : -1;
}

}  // namespace attnops
