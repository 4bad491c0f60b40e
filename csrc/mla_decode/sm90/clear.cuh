#pragma once
#include <cstdint>

namespace attnops::mla_decode::sm90 {

// 16 bytes of zeros in shared memory, by an ordinary write.
__device__ inline void clear16(uint32_t shared) {
  asm volatile("st.shared.v4.b32 [%0], {%1, %1, %1, %1};" ::"r"(shared), "r"(0) : "memory");
}

}  // namespace attnops::mla_decode::sm90
