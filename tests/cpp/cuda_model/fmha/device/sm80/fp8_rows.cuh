#pragma once
#include <cuda_fp8.h>

#include "device/sm80/cp_async.cuh"

namespace attnops {

inline void cp_async_8(uint32_t destination, const void* source, bool take) {
  begin_copy(destination, source, 8, take);
}

template <typename T>
uint4 widen(bool is_e5m2, uint2 bytes) {
  uint4 wide;
  for (int i = 0; i < 8; ++i) {
    const auto byte = reinterpret_cast<const unsigned char*>(&bytes)[i];
    const __half_raw half = __nv_cvt_fp8_to_halfraw(byte, is_e5m2 ? __NV_E5M2 : __NV_E4M3);
    reinterpret_cast<T*>(&wide)[i] = T(__half2float(__half(half)));
  }
  return wide;
}

}  // namespace attnops
