#pragma once
#include <atomic>

#include "device/common/launch_dependent.cuh"

namespace attnops {

// Above so many CTAs of a cluster the device must be told that a kernel may have them: not every device does.
inline constexpr int kPortableCluster = 8;

// How many clusters of a launch the current device holds at a time: they need as many free SMs that are neighbours.
// Asked once per kernel, device and size of cluster; sizes go up to kMostCtas.
template <auto kKernel, int kMostCtas = kPortableCluster>
int clusters_at_once(const char* what, const LaunchShape& shape) {
  constexpr int kMaxDevices = 64;
  static std::atomic<int> known[kMaxDevices][kMostCtas + 1];  // one more than it is; 0: not asked yet
  if (!launch_dependent_prepare<kKernel>(what, shape.max_shared_bytes) || shape.cluster > kMostCtas) return 0;
  int device = 0;
  check_cuda(cudaGetDevice(&device), what);
  std::atomic<int>& answer = known[device % kMaxDevices][shape.cluster];
  if (answer == 0) {
    if constexpr (kMostCtas > kPortableCluster) {
      check_cuda(cudaFuncSetAttribute(kKernel, cudaFuncAttributeNonPortableClusterSizeAllowed, 1), what);
    }
    cudaLaunchAttribute attribute{};
    attribute.id = cudaLaunchAttributeClusterDimension;
    attribute.val.clusterDim = {static_cast<unsigned>(shape.cluster), 1, 1};
    cudaLaunchConfig_t config{};
    config.gridDim = dim3(static_cast<unsigned>(shape.cluster));
    config.blockDim = dim3(static_cast<unsigned>(shape.threads));
    config.dynamicSmemBytes = static_cast<size_t>(shape.shared_bytes);
    config.attrs = &attribute;
    config.numAttrs = 1;
    int count = 0;
    check_cuda(cudaOccupancyMaxActiveClusters(&count, kKernel, &config), what);
    answer = count + 1;
  }
  return answer - 1;
}

}  // namespace attnops
