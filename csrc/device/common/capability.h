#pragma once
#include <cstdint>
#include <cstdlib>
#include <stdexcept>
#include <string>

#include "device/common/arch.h"

namespace attnops {

// What ATTNOPS_CUDA_ARCH caps architectures at, read at every call: how tests reach the kernels of earlier ones.
inline int arch_cap() {
  const char* text = std::getenv("ATTNOPS_CUDA_ARCH");
  if (text == nullptr || *text == 0) return INT32_MAX;
  char* end = nullptr;
  const long value = std::strtol(text, &end, 10);
  if (*end != 0 || value < 80 || value > 999) {
    throw std::runtime_error(
        "attnops: environment variable ATTNOPS_CUDA_ARCH must be a compute capability times ten from 80 on, got " +
        std::string(text));
  }
  return static_cast<int>(value);
}

// Compute capability times ten whose kernels serve the current device: its own, or the cap.
inline int usable_sm(const char* what) {
  const int sm = device_sm(what), cap = arch_cap();
  return sm < cap ? sm : cap;
}

// Shared memory of a multiprocessor of the current device, in bytes.
inline int device_shared_bytes(const char* what) {
  int device = 0, bytes = 0;
  check_cuda(cudaGetDevice(&device), what);
  check_cuda(cudaDeviceGetAttribute(&bytes, cudaDevAttrMaxSharedMemoryPerMultiprocessor, device), what);
  return bytes;
}

}  // namespace attnops
