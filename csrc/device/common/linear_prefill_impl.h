#pragma once
#include <cuda_runtime_api.h>

#include <string>

#include "core/linear_chunk.h"
#include "device/common/capability.h"
#include "device/common/launch.h"
#include "device/common/vec.h"

namespace attnops {

// A row of a prefill op's table of kernels: keys up to a bound, whole chunks or token by token.
struct LinearPrefillImpl {
  const char* name;
  int sm;  // that it needs at least; 90: exactly
  int max_keys;
  bool chunks;       // else token by token, of any kind
  bool channels;     // chunks: whether a gate per channel
  int shared_bytes;  // of the largest kernel
  void (*launch)(const LinearPrefill&, CUstream_st*);

  std::string reject(const LinearPrefill& p) const {
    const LinearStep& step = p.step;
    if (step.key_dim > max_keys) return "takes keys of at most " + std::to_string(max_keys) + " elements";
    return chunks ? reject_chunks(p) : "";
  }

 private:
  std::string reject_chunks(const LinearPrefill& p) const {
    const LinearStep& step = p.step;
    if (step.gate_per_channel != channels) {
      return channels ? "takes a gate per channel, got one per head" : "takes a gate per head, got one per channel";
    }
    if (step.dtype != DType::kBFloat16) return std::string("takes tokens of bfloat16, got ") + name_of(step.dtype);
    if (p.scratch == nullptr) return "needs scratch";
    const auto aligned = [](const StepRows& rows) {
      return rows.data == nullptr || rows_aligned(rows.data, 2, 16, rows.stride_request, rows.stride_head);
    };
    const bool rows = step.key_dim % 8 == 0 && step.value_dim % 8 == 0 && aligned(step.q) && aligned(step.k) &&
                      aligned(step.v) && aligned(step.z) &&
                      rows_aligned(step.out, 2, 16, step.out_stride_request, step.out_stride_head);
    if (!rows) return "rows must start on 16-byte boundaries";
    const int usable = usable_sm(name);
    if (sm == 90 ? usable != 90 : usable < sm) {
      return "runs on sm_" + std::to_string(sm) + ", this device is sm_" + std::to_string(usable);
    }
    int device = 0, most = 0;
    check_cuda(cudaGetDevice(&device), name);
    check_cuda(cudaDeviceGetAttribute(&most, cudaDevAttrMaxSharedMemoryPerBlockOptin, device), name);
    return shared_bytes <= most ? "" : "needs " + std::to_string(shared_bytes) + " bytes of shared memory";
  }
};

}  // namespace attnops
