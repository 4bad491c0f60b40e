#pragma once
#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/macros.h>
#include <torch/csrc/stable/tensor.h>

#include <optional>

// The headers of a CPU build of torch do not declare this stable C function; libtorch_cuda holds it.
extern "C" int32_t aoti_torch_get_current_cuda_stream(int32_t device_index, void** ret_stream);

struct CUstream_st;

namespace attnops {

// The stream that torch would launch on.
inline CUstream_st* current_stream(int32_t device) {
  void* stream = nullptr;
  STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_get_current_cuda_stream(device, &stream));
  return static_cast<CUstream_st*>(stream);
}

inline CUstream_st* current_stream(const torch::stable::Tensor& tensor) {
  return current_stream(tensor.get_device_index());
}

// Makes a device the current one for a scope. Where it is already, as in almost every call, nothing is set or restored.
class OnDevice {
 public:
  explicit OnDevice(int32_t device) {
    if (torch::stable::accelerator::getCurrentDeviceIndex() != device) guard_.emplace(device);
  }
  explicit OnDevice(const torch::stable::Tensor& tensor) : OnDevice(tensor.get_device_index()) {}

 private:
  std::optional<torch::stable::accelerator::DeviceGuard> guard_;
};

}  // namespace attnops
