#pragma once
#include <cstdint>

namespace attnops {

__device__ __forceinline__ uint32_t smem_address(const void* pointer) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
}

// 16 bytes from global to shared memory, past L1. Without `take` the destination becomes zeros and the source is not
// read (PTX ISA: cp.async with src-size 0).
__device__ __forceinline__ void cp_async_16(uint32_t destination, const void* source, bool take) {
  const int bytes = take ? 16 : 0;
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;\n" ::"r"(destination), "l"(source), "r"(bytes)
               : "memory");
}

// The same if `go`; else nothing happens, and the destination stays as it is. A predicate, where a branch would end
// what the compiler may reorder.
__device__ __forceinline__ void cp_async_16_if(bool go, uint32_t destination, const void* source, bool take) {
  const int bytes = take ? 16 : 0;
  asm volatile(
      "{\n.reg .pred p;\nsetp.ne.b32 p, %3, 0;\n@p cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;\n}\n" ::"r"(
          destination),
      "l"(source), "r"(bytes), "r"(static_cast<int>(go))
      : "memory");
}

// 4 or 8 bytes from global to shared memory.
template <int kBytes>
__device__ __forceinline__ void cp_async_few(uint32_t destination, const void* source) {
  static_assert(kBytes == 4 || kBytes == 8);
  asm volatile("cp.async.ca.shared.global [%0], [%1], %2;\n" ::"r"(destination), "l"(source), "n"(kBytes) : "memory");
}

__device__ __forceinline__ void cp_async_commit() { asm volatile("cp.async.commit_group;\n" ::: "memory"); }

// Until at most kPending of this thread's newest groups are still under way.
template <int kPending>
__device__ __forceinline__ void cp_async_wait() {
  asm volatile("cp.async.wait_group %0;\n" ::"n"(kPending) : "memory");
}

// Until all of this thread's copies have landed, committed or not.
__device__ __forceinline__ void cp_async_wait_all() { asm volatile("cp.async.wait_all;\n" ::: "memory"); }

}  // namespace attnops
