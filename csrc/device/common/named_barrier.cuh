#pragma once

// Barriers of some of a CTA's threads, whole warps of them. Who arrives does not wait, and whoever syncs sees what came
// before the arrivals.
namespace attnops {

__device__ __forceinline__ void sync_named(int id, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

__device__ __forceinline__ void arrive_named(int id, int threads) {
  asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

}  // namespace attnops
