#pragma once
#include <cstdint>

// Words of shared memory by its 32-bit addresses, and the four of a 16-byte boundary at once.
namespace attnops::sm90 {

template <typename T>
__device__ __forceinline__ void load_word(T& word, uint32_t shared) {
  static_assert(sizeof(T) == 4 && !__is_same(T, float));
  asm volatile("ld.shared.b32 %0, [%1];" : "=r"(word) : "r"(shared) : "memory");
}
__device__ __forceinline__ void load_word(float& word, uint32_t shared) {
  asm volatile("ld.shared.f32 %0, [%1];" : "=f"(word) : "r"(shared) : "memory");
}

__device__ __forceinline__ void store_word(uint32_t shared, int word) {
  asm volatile("st.shared.b32 [%0], %1;" ::"r"(shared), "r"(word) : "memory");
}

__device__ __forceinline__ void load_words(uint32_t (&words)[4], uint32_t shared) {
  asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
               : "=r"(words[0]), "=r"(words[1]), "=r"(words[2]), "=r"(words[3])
               : "r"(shared)
               : "memory");
}

__device__ __forceinline__ void store_words(uint32_t shared, const uint32_t* words) {
  asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};" ::"r"(shared), "r"(words[0]), "r"(words[1]), "r"(words[2]),
               "r"(words[3])
               : "memory");
}

// 16 bytes of zeros.
__device__ __forceinline__ void clear_words(uint32_t shared) {
  asm volatile("st.shared.v4.b32 [%0], {%1, %1, %1, %1};" ::"r"(shared), "r"(0) : "memory");
}

}  // namespace attnops::sm90
