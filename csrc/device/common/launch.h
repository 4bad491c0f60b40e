#pragma once
#include <cuda_runtime_api.h>

#include <stdexcept>
#include <string>

namespace attnops {

// A failed CUDA call becomes an exception that names what was tried.
inline void check_cuda(cudaError_t status, const char* what) {
  if (status != cudaSuccess) {
    throw std::runtime_error(std::string("attnops: ") + what + ": " + cudaGetErrorString(status));
  }
}

}  // namespace attnops
