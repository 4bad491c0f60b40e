#pragma once
#include "device/sm80/cp_async.cuh"
#include "device/sm90/barrier.cuh"
#include "device/sm90/tensor_map.h"

// Copies of the engine are over at some time after they are asked for. Those of threads at once.
namespace attnops::sm90 {

inline void arrive_after_copies(uint32_t barrier) { mbarrier_arrive(barrier); }
inline void wait_for_copies() {}

inline void copy_bytes(uint32_t shared, const void* global, int bytes, uint32_t barrier) {
  if (shared % 16 != 0 || bytes % 16 != 0 || shared + bytes > sizeof(memory)) std::abort();
  cuda_model::later([=] {
    std::memcpy(memory + shared, global, bytes);
    mbarrier_complete(barrier, bytes);
  });
}

// 64 columns from x on, rows from y on, of plane z, under the 128-byte swizzle.
inline void copy_box(uint32_t shared, const CUtensorMap* map, uint32_t barrier, int x, int y, int z) {
  MapGeometry g;
  std::memcpy(&g, map, sizeof(g));
  if (shared % 1024 != 0 || shared + 128 * g.box_rows > sizeof(memory)) std::abort();
  cuda_model::later([=] {
    for (uint32_t row = 0; row < g.box_rows; ++row) {
      for (uint32_t column = 0; column < 64; ++column) {
        const uint64_t at[3] = {x + uint64_t{column}, y + uint64_t{row}, static_cast<uint64_t>(z)};
        uint16_t element = 0;
        if (at[0] < g.extents[0] && at[1] < g.extents[1] && at[2] < g.extents[2]) {
          std::memcpy(&element,
                      static_cast<const char*>(g.base) + 2 * at[0] + at[1] * g.strides[0] + at[2] * g.strides[1], 2);
        }
        std::memcpy(memory + shared + row * 128 + ((column / 8 ^ (row & 7)) << 4) + column % 8 * 2, &element, 2);
      }
    }
    mbarrier_complete(barrier, 128 * g.box_rows);
  });
}

inline void copy_box_to_ctas(uint32_t shared, const CUtensorMap* map, uint32_t barrier, int x, int y, int z, int) {
  copy_box(shared, map, barrier, x, y, z);
}

}  // namespace attnops::sm90
