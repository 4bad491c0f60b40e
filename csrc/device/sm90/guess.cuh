#pragma once
#include <cstdint>

namespace attnops::sm90 {

// What lies in L2 now, though another kernel may be writing it: only good for guesses.
__device__ inline int load_guess(const int32_t* address) {
  int value;
  asm volatile("ld.relaxed.gpu.global.b32 %0, [%1];" : "=r"(value) : "l"(address) : "memory");
  return value;
}

__device__ inline int4 load_guess(const int4* address) {
  int4 value;
  asm volatile("ld.relaxed.gpu.global.v2.b64 {%0, %1}, [%2];"
               : "=l"(reinterpret_cast<uint64_t*>(&value)[0]), "=l"(reinterpret_cast<uint64_t*>(&value)[1])
               : "l"(address)
               : "memory");
  return value;
}

}  // namespace attnops::sm90
