#pragma once
#include <cuda.h>
#include <cuda_runtime_api.h>

#include <cstring>

#include "core/types.h"

// Tensor maps of 16-bit elements, by their definition: what the driver would encode, as it was given.
namespace attnops::sm90 {

struct MapGeometry {
  DType dtype;
  const void* base;
  uint64_t extents[3];  // innermost first
  uint64_t strides[2];  // in bytes, of dimensions 1 and 2
  uint32_t box_rows;
};

inline CUtensorMap make_tensor_map(const MapGeometry& g) {
  if (reinterpret_cast<uintptr_t>(g.base) % 16 != 0 || g.strides[0] % 16 != 0 || g.strides[1] % 16 != 0) std::abort();
  CUtensorMap map;
  static_assert(sizeof(g) <= sizeof(map));
  std::memcpy(&map, &g, sizeof(g));
  return map;
}

}  // namespace attnops::sm90
