#pragma once
#include <torch/csrc/stable/macros.h>
#include <torch/csrc/stable/tensor.h>

// The headers of a CPU build of torch do not declare this stable C function; libtorch_cuda holds it.
extern "C" int32_t aoti_torch_get_current_cuda_stream(int32_t device_index, void** ret_stream);

struct CUstream_st;

namespace attnops {

// The stream that torch would launch on for this tensor's device.
inline CUstream_st* current_stream(const torch::stable::Tensor& tensor) {
  void* stream = nullptr;
  STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_get_current_cuda_stream(tensor.get_device_index(), &stream));
  return static_cast<CUstream_st*>(stream);
}

}  // namespace attnops
