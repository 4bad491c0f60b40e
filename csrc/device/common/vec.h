#pragma once
#include <cstdint>

#include "core/types.h"

namespace attnops {

// One memory access of up to 16 bytes. Kernels take the widest that base pointers, strides and extents allow.
template <typename T, int kElements>
struct alignas(sizeof(T) * kElements) Vec {
  static constexpr int kSize = kElements;
  T data[kElements];
};

template <typename V, typename T>
ATTNOPS_HOST_DEVICE inline V load_vec(const T* pointer) {
  return *reinterpret_cast<const V*>(pointer);
}

template <typename V, typename T>
ATTNOPS_HOST_DEVICE inline void store_vec(T* pointer, const V& value) {
  *reinterpret_cast<V*>(pointer) = value;
}

// Whether every row of a strided array starts on a boundary of `bytes`: the base does, and so does each stride.
template <typename... Strides>
bool rows_aligned(const void* base, int element_size, int bytes, Strides... strides) {
  return reinterpret_cast<uintptr_t>(base) % bytes == 0 && (... && (strides * element_size % bytes == 0));
}

}  // namespace attnops
