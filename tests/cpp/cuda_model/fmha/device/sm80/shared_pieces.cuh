#pragma once
#include "device/sm80/mma.cuh"

namespace attnops {

inline void store_shared(uint32_t address, uint32_t word) {
  if (address % 4 != 0) std::abort();
  std::memcpy(memory + address, &word, 4);
}
inline void store_shared(uint32_t address, const uint4& piece) {
  if (address % 16 != 0) std::abort();
  std::memcpy(memory + address, &piece, 16);
}
inline uint4 load_shared_piece(uint32_t address) {
  if (address % 16 != 0) std::abort();
  uint4 piece;
  std::memcpy(&piece, memory + address, 16);
  return piece;
}

}  // namespace attnops
