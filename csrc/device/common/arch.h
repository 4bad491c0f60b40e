#pragma once
#include <cuda_runtime_api.h>

#include "device/common/launch.h"

namespace attnops {

// Compute capability times ten of the current device.
inline int device_sm(const char* what) {
  int device = 0, major = 0, minor = 0;
  check_cuda(cudaGetDevice(&device), what);
  check_cuda(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device), what);
  check_cuda(cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, device), what);
  return 10 * major + minor;
}

// SMs of the current device.
inline int device_sms(const char* what) {
  int device = 0, sms = 0;
  check_cuda(cudaGetDevice(&device), what);
  check_cuda(cudaDeviceGetAttribute(&sms, cudaDevAttrMultiProcessorCount, device), what);
  return sms;
}

}  // namespace attnops
