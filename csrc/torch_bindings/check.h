#pragma once
#include <torch/csrc/stable/tensor.h>

#include <cstdint>
#include <functional>
#include <initializer_list>
#include <optional>
#include <string>

#include "core/types.h"

namespace attnops {

using torch::stable::Tensor;
using OptionalTensor = std::optional<Tensor>;

inline const OptionalTensor kAbsent;

DType dtype_of(const Tensor& tensor);                             // throws on a dtype that no op knows
bool has_dtype(const Tensor& tensor, DType dtype);                // false also for dtypes unknown here
std::string shape_text(const Tensor& tensor);                     // "[2, 3]"
[[noreturn]] void fail(const char* op, const std::string& text);  // "attnops::op: text"

// A named extent. The first tensor that mentions it binds it, every later tensor must agree.
class Dim {
 public:
  explicit Dim(const char* name) : name_(name) {}
  Dim(const char* name, int64_t extent, const char* bound_by) : name_(name), extent_(extent), bound_by_(bound_by) {}

  int64_t operator*() const { return extent_.value(); }
  int as_int() const { return static_cast<int>(extent_.value()); }

 private:
  friend class TensorCheck;
  const char* name_;
  std::optional<int64_t> extent_;  // optional, not a sentinel: 0 tokens is a legal extent
  const char* bound_by_ = "";
};

// Checks of one tensor argument. Each method throws, naming op, argument, dimension, expected and actual value.
class TensorCheck {
 public:
  TensorCheck(const char* op, const char* name, const Tensor& tensor) : op_(op), name_(name), tensor_(tensor) {}

  const TensorCheck& dtype(std::initializer_list<DType> allowed) const;
  const TensorCheck& dtype_as(const char* other_name, const Tensor& other) const;
  const TensorCheck& device_as(const char* other_name, const Tensor& other) const;
  const TensorCheck& rank(int64_t rank) const;
  const TensorCheck& shape(std::initializer_list<std::reference_wrapper<Dim>> dims) const;
  const TensorCheck& size_at_least(int64_t axis, const char* dim, int64_t least, const char* reason) const;
  const TensorCheck& dense_last() const;  // the last dimension has stride 1; every other stride is free
  const TensorCheck& contiguous() const;
  const TensorCheck& apart() const;  // of what is written: no two elements share an address
  const TensorCheck& aligned(int bytes) const;  // of the data pointer

 private:
  std::string label() const;
  void match(Dim& dim, size_t axis, int64_t actual) const;

  const char* op_;
  const char* name_;
  const Tensor& tensor_;
};

// A scalar argument within [low, high].
void check_range(const char* op, const char* name, int64_t value, int64_t low, int64_t high);
// A scalar that kernels take as a float32, in which it must be finite, too.
void check_finite(const char* op, const char* name, double value);

// Where a tensor begins. Never null, for which a kernel takes what is absent: torch has no address where nothing lies.
template <typename T>
T* address_of(const Tensor& tensor) {
  alignas(16) static char nothing[16];
  void* data = tensor.mutable_data_ptr();
  return static_cast<T*>(data != nullptr ? data : nothing);
}

template <typename T>
T* data_or_null(const OptionalTensor& tensor) {
  return tensor ? static_cast<T*>(tensor->mutable_data_ptr()) : nullptr;
}

}  // namespace attnops
