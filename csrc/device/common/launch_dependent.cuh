#pragma once
#include <atomic>

#include "device/common/launch.h"

namespace attnops {

struct LaunchShape {
  int blocks, threads;
  int shared_bytes;      // dynamic shared memory of this launch
  int max_shared_bytes;  // and the most that any launch of the kernel asks for
  int blocks_y = 1, blocks_z = 1;
  int cluster = 1;  // blocks that run at the same time and share memory; Hopper
};

// Whether the current device knows dependent launches. Tells the device, once, what it must be told of the kernel; all
// kernels ask for the same division of an SM's memory, since changing it between two kernels keeps them apart.
template <auto kKernel>
bool launch_dependent_prepare(const char* what, int max_shared_bytes) {
  enum : int { kNew, kPlain, kDependent };
  constexpr int kMaxDevices = 64;
  static std::atomic<int> states[kMaxDevices];
  int device = 0;
  check_cuda(cudaGetDevice(&device), what);
  std::atomic<int>& state = states[device % kMaxDevices];
  if (state == kNew) {
    int major = 0, most = 0;
    check_cuda(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device), what);
    check_cuda(cudaDeviceGetAttribute(&most, cudaDevAttrMaxSharedMemoryPerBlockOptin, device), what);
    if (max_shared_bytes > most) max_shared_bytes = most;  // a launch that needs more fails by itself
    check_cuda(cudaFuncSetAttribute(kKernel, cudaFuncAttributeMaxDynamicSharedMemorySize, max_shared_bytes), what);
    check_cuda(cudaFuncSetAttribute(kKernel, cudaFuncAttributePreferredSharedMemoryCarveout, 100), what);
    state = major >= 9 ? kDependent : kPlain;
  }
  return state == kDependent;
}

// Launches a kernel that waits by itself for the kernels ahead of it (device/common/pdl.cuh), on devices that know how.
template <auto kKernel, typename... Arguments>
void launch_dependent(const char* what, const LaunchShape& shape, cudaStream_t stream, const Arguments&... arguments) {
  const bool dependent = launch_dependent_prepare<kKernel>(what, shape.max_shared_bytes);
  cudaLaunchAttribute attributes[2]{};
  int count = 0;
  if (dependent) {
    attributes[count].id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attributes[count++].val.programmaticStreamSerializationAllowed = 1;
  }
  if (shape.cluster > 1) {
    attributes[count].id = cudaLaunchAttributeClusterDimension;
    attributes[count++].val.clusterDim = {static_cast<unsigned>(shape.cluster), 1, 1};
  }
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(static_cast<unsigned>(shape.blocks), static_cast<unsigned>(shape.blocks_y),
                        static_cast<unsigned>(shape.blocks_z));
  config.blockDim = dim3(static_cast<unsigned>(shape.threads));
  config.dynamicSmemBytes = static_cast<size_t>(shape.shared_bytes);
  config.stream = stream;
  config.attrs = attributes;
  config.numAttrs = count;
  check_cuda(cudaLaunchKernelEx(&config, kKernel, arguments...), what);
}

}  // namespace attnops
