#pragma once
#include <cuda.h>

#include <cstdint>

// Boxes from shared to global memory by the copy engine. What a thread has asked for is over when it has waited.
namespace attnops::sm90 {

// 3-dimensional, from coordinates x, y, z on. What lies outside of the tensor is not written.
__device__ inline void store_box(const CUtensorMap* map, uint32_t shared, int x, int y, int z) {
  asm volatile("cp.async.bulk.tensor.3d.global.shared::cta.tile.bulk_group [%0, {%2, %3, %4}], [%1];" ::"l"(map),
               "r"(shared), "r"(x), "r"(y), "r"(z)
               : "memory");
}
__device__ inline void commit_stores() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }
// Until all that was stored has been read from shared memory, or written.
__device__ inline void wait_for_reads() { asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory"); }
__device__ inline void wait_for_stores() { asm volatile("cp.async.bulk.wait_group 0;" ::: "memory"); }

}  // namespace attnops::sm90
