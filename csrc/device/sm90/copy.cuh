#pragma once
#include <cuda.h>

#include <cstdint>

// Copies from global to shared memory that do not pass through registers.
namespace attnops::sm90 {

// 16 bytes; zeros when `valid` is false, and then nothing is read.
__device__ inline void copy16(uint32_t shared, const void* global, bool valid) {
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(shared), "l"(global), "r"(valid ? 16 : 0)
               : "memory");
}

// 16 bytes, always.
__device__ inline void copy16(uint32_t shared, const void* global) {
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16;" ::"r"(shared), "l"(global) : "memory");
}

// The same under a cache policy.
__device__ inline void copy16(uint32_t shared, const void* global, uint64_t policy) {
  asm volatile("cp.async.cg.shared.global.L2::cache_hint.L2::128B [%0], [%1], 16, %2;" ::"r"(shared), "l"(global),
               "l"(policy)
               : "memory");
}

// 8 bytes, whose line then lies in L1; zeros, and nothing is read, unless `valid`.
__device__ inline void copy8(uint32_t shared, const void* global, bool valid) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 8, %2;" ::"r"(shared), "l"(global), "r"(valid ? 8 : 0)
               : "memory");
}

// 4 bytes, whose line then lies in L1.
__device__ inline void copy4(uint32_t shared, const void* global) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(shared), "l"(global) : "memory");
}

// Waits until all earlier copies of this thread have landed.
__device__ inline void wait_for_copies() { asm volatile("cp.async.wait_all;" ::: "memory"); }

// Arrives at the barrier once all earlier copies of this thread have landed; counts as one of its arrivals.
__device__ inline void arrive_after_copies(uint32_t barrier) {
  asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(barrier) : "memory");
}

// One box of a 3- or 4-dimensional tensor map, by the copy engine; adds its bytes to the barrier's transaction.
__device__ inline void copy_box(uint32_t shared, const CUtensorMap* map, uint32_t barrier, int x, int y, int z) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, %5}], "
      "[%2];" ::"r"(shared),
      "l"(map), "r"(barrier), "r"(x), "r"(y), "r"(z)
      : "memory");
}

__device__ inline void copy_box(uint32_t shared, const CUtensorMap* map, uint32_t barrier, int x, int y, int z, int w) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, %5, %6}], "
      "[%2];" ::"r"(shared),
      "l"(map), "r"(barrier), "r"(x), "r"(y), "r"(z), "r"(w)
      : "memory");
}

// The same into every CTA of the cluster that `ctas` has a bit for: at the same place, and counted by its own barrier.
__device__ inline void copy_box_to_ctas(uint32_t shared, const CUtensorMap* map, uint32_t barrier, int x, int y, int z,
                                        int w, int ctas) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.multicast::cluster [%0], [%1, "
      "{%3, %4, %5, %6}], [%2], %7;" ::"r"(shared),
      "l"(map), "r"(barrier), "r"(x), "r"(y), "r"(z), "r"(w), "h"(static_cast<uint16_t>(ctas))
      : "memory");
}

// The same of a 3-dimensional tensor map.
__device__ inline void copy_box_to_ctas(uint32_t shared, const CUtensorMap* map, uint32_t barrier, int x, int y, int z,
                                        int ctas) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.multicast::cluster [%0], [%1, "
      "{%3, %4, %5}], [%2], %6;" ::"r"(shared),
      "l"(map), "r"(barrier), "r"(x), "r"(y), "r"(z), "h"(static_cast<uint16_t>(ctas))
      : "memory");
}

// The same of a 5-dimensional tensor map.
__device__ inline void copy_box(uint32_t shared, const CUtensorMap* map, uint32_t barrier, int x, int y, int z, int w,
                                int v) {
  asm volatile(
      "cp.async.bulk.tensor.5d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, %5, %6, "
      "%7}], [%2];" ::"r"(shared),
      "l"(map), "r"(barrier), "r"(x), "r"(y), "r"(z), "r"(w), "r"(v)
      : "memory");
}

__device__ inline void copy_box_to_ctas(uint32_t shared, const CUtensorMap* map, uint32_t barrier, int x, int y, int z,
                                        int w, int v, int ctas) {
  asm volatile(
      "cp.async.bulk.tensor.5d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.multicast::cluster [%0], [%1, "
      "{%3, %4, %5, %6, %7}], [%2], %8;" ::"r"(shared),
      "l"(map), "r"(barrier), "r"(x), "r"(y), "r"(z), "r"(w), "r"(v), "h"(static_cast<uint16_t>(ctas))
      : "memory");
}

// The same under a cache policy.
__device__ inline void copy_box(uint32_t shared, const CUtensorMap* map, uint32_t barrier, int x, int y, int z, int w,
                                uint64_t policy) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1, {%3, "
      "%4, %5, %6}], [%2], %7;" ::"r"(shared),
      "l"(map), "r"(barrier), "r"(x), "r"(y), "r"(z), "r"(w), "l"(policy)
      : "memory");
}

__device__ inline void copy_box(uint32_t shared, const CUtensorMap* map, uint32_t barrier, int x, int y, int z,
                                uint64_t policy) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1, {%3, "
      "%4, %5}], [%2], %6;" ::"r"(shared),
      "l"(map), "r"(barrier), "r"(x), "r"(y), "r"(z), "l"(policy)
      : "memory");
}

// A run of bytes, by the copy engine, under a cache policy; adds them to the barrier's transaction. Both addresses and
// the count are multiples of 16.
__device__ inline void copy_bytes(uint32_t shared, const void* global, int bytes, uint32_t barrier, uint64_t policy) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1], %2, [%3], %4;" ::
          "r"(shared),
      "l"(global), "r"(bytes), "r"(barrier), "l"(policy)
      : "memory");
}

// The same under no policy.
__device__ inline void copy_bytes(uint32_t shared, const void* global, int bytes, uint32_t barrier) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(shared),
               "l"(global), "r"(bytes), "r"(barrier)
               : "memory");
}

// Asks for a box of a 4-dimensional tensor map to be in L2 soon. What lies outside the tensor is not touched.
__device__ inline void prefetch_box(const CUtensorMap* map, int x, int y, int z, int w) {
  asm volatile("cp.async.bulk.prefetch.tensor.4d.L2.global.tile [%0, {%1, %2, %3, %4}];" ::"l"(map), "r"(x), "r"(y),
               "r"(z), "r"(w)
               : "memory");
}

// For what is read once, and for what is read again soon.
__device__ inline uint64_t l2_policy(bool read_once) {
  uint64_t once, again;
  asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(once));
  asm("createpolicy.fractional.L2::evict_normal.b64 %0, 1.0;" : "=l"(again));
  return read_once ? once : again;
}

__device__ inline void prefetch_map(const CUtensorMap* map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
}

}  // namespace attnops::sm90
