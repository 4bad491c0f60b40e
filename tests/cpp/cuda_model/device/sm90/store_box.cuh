#pragma once
#include "device/sm90/tensor_map.h"

// Stores of the engine read shared memory at some time before they are waited for, here at once.
namespace attnops::sm90 {

// 64 columns from x on, rows from y on, of plane z, that lie under the 128-byte swizzle.
inline void store_box(const CUtensorMap* map, uint32_t shared, int x, int y, int z) {
  MapGeometry g;
  std::memcpy(&g, map, sizeof(g));
  if (shared % 1024 != 0 || shared + 128 * g.box_rows > sizeof(memory)) std::abort();
  for (uint32_t row = 0; row < g.box_rows; ++row) {
    for (uint32_t column = 0; column < 64; ++column) {
      const uint64_t at[3] = {x + uint64_t{column}, y + uint64_t{row}, static_cast<uint64_t>(z)};
      if (at[0] >= g.extents[0] || at[1] >= g.extents[1] || at[2] >= g.extents[2]) continue;
      char* to =
          static_cast<char*>(const_cast<void*>(g.base)) + 2 * at[0] + at[1] * g.strides[0] + at[2] * g.strides[1];
      std::memcpy(to, memory + shared + row * 128 + ((column / 8 ^ (row & 7)) << 4) + column % 8 * 2, 2);
    }
  }
}
inline void commit_stores() {}
inline void wait_for_reads() {}
inline void wait_for_stores() {}

}  // namespace attnops::sm90
