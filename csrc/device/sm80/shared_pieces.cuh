#pragma once
#include <cstdint>

// Words and pieces of sixteen bytes at addresses of shared memory.
namespace attnops {

__device__ __forceinline__ void store_shared(uint32_t address, uint32_t word) {
  asm volatile("st.shared.b32 [%0], %1;" ::"r"(address), "r"(word) : "memory");
}

__device__ __forceinline__ void store_shared(uint32_t address, const uint4& piece) {
  asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(piece.x), "r"(piece.y), "r"(piece.z),
               "r"(piece.w)
               : "memory");
}

__device__ __forceinline__ uint4 load_shared_piece(uint32_t address) {
  uint4 piece;
  asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
               : "=r"(piece.x), "=r"(piece.y), "=r"(piece.z), "=r"(piece.w)
               : "r"(address)
               : "memory");
  return piece;
}

}  // namespace attnops
