#pragma once
#include "device/sm80/mma.cuh"

namespace attnops {

inline uint32_t smem_address(const void* pointer) {
  return static_cast<uint32_t>(static_cast<const unsigned char*>(pointer) - memory);
}

inline void cp_async_16(uint32_t destination, const void* source, bool take) {
  if (destination % 16 != 0 || destination + 16 > sizeof(memory)) std::abort();
  if (take) {
    std::memcpy(memory + destination, source, 16);
  } else {
    std::memset(memory + destination, 0, 16);
  }
}
inline void cp_async_16(uint32_t destination, const void* source, bool take, uint64_t) {
  cp_async_16(destination, source, take);
}
inline void cp_async_commit() {}
template <int kPending>
void cp_async_wait() {}
inline void cp_async_wait_all() {}

}  // namespace attnops
