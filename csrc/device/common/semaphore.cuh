#pragma once
#include <cstdint>

// Counters in memory by which the CTAs of a launch find each other.
namespace attnops {

__device__ inline long long now_nanoseconds() {
  long long time;
  asm volatile("mov.u64 %0, %globaltimer;\n" : "=l"(time));
  return time;
}

__device__ inline unsigned load_acquire(const int32_t* semaphore) {
  unsigned value;
  asm volatile("ld.acquire.gpu.global.u32 %0, [%1];\n" : "=r"(value) : "l"(semaphore) : "memory");
  return value;
}

// What was there before. Releases what the CTA wrote before its last barrier, acquires what others released.
__device__ inline unsigned add_acq_rel(int32_t* semaphore, unsigned value) {
  unsigned before;
  asm volatile("atom.add.acq_rel.gpu.global.u32 %0, [%1], %2;\n"
               : "=r"(before)
               : "l"(semaphore), "r"(value)
               : "memory");
  return before;
}

// The same without any order among other accesses.
__device__ inline unsigned add_relaxed(int32_t* semaphore, unsigned value) {
  unsigned before;
  asm volatile("atom.add.relaxed.gpu.global.u32 %0, [%1], %2;\n"
               : "=r"(before)
               : "l"(semaphore), "r"(value)
               : "memory");
  return before;
}

// What was there before: `value` is there now if that was `expected`. Acquires and releases as add_acq_rel.
__device__ inline unsigned compare_and_swap(int32_t* semaphore, unsigned expected, unsigned value) {
  unsigned before;
  asm volatile("atom.cas.acq_rel.gpu.global.b32 %0, [%1], %2, %3;\n"
               : "=r"(before)
               : "l"(semaphore), "r"(expected), "r"(value)
               : "memory");
  return before;
}

}  // namespace attnops
