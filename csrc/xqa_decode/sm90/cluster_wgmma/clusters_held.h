#pragma once
#include <cuda_runtime.h>

#include <atomic>

#include "device/common/launch.h"
#include "xqa_decode/sm90/cluster_wgmma/limits.h"

namespace attnops::xqa_decode::sm90 {

// How many clusters of so many CTAs of a kernel the current device holds at a time. It is asked once.
template <auto kKernel>
int most_clusters(const char* what, int log_ctas, int threads, int shared_bytes) {
  constexpr int kMaxDevices = 64;
  static std::atomic<int> answers[kMaxDevices][kMaxLogCtas + 1];  // plus one: 0 is unknown
  int device = 0;
  check_cuda(cudaGetDevice(&device), what);
  std::atomic<int>& answer = answers[device % kMaxDevices][log_ctas];
  if (answer == 0) {
    check_cuda(cudaFuncSetAttribute(kKernel, cudaFuncAttributeNonPortableClusterSizeAllowed, 1), what);
    cudaLaunchAttribute attribute{};
    attribute.id = cudaLaunchAttributeClusterDimension;
    attribute.val.clusterDim = {1u << log_ctas, 1, 1};
    cudaLaunchConfig_t config{};
    config.gridDim = dim3(1u << log_ctas);
    config.blockDim = dim3(static_cast<unsigned>(threads));
    config.dynamicSmemBytes = static_cast<size_t>(shared_bytes);
    config.attrs = &attribute;
    config.numAttrs = 1;
    int clusters = 0;
    check_cuda(cudaOccupancyMaxActiveClusters(&clusters, kKernel, &config), what);
    answer = clusters + 1;
  }
  return answer - 1;
}

}  // namespace attnops::xqa_decode::sm90
