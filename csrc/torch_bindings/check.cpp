#include "torch_bindings/check.h"

#include <torch/headeronly/core/ScalarType.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <stdexcept>
#include <utility>
#include <vector>

namespace attnops {
namespace {

using torch::headeronly::ScalarType;

std::optional<DType> known_dtype(const Tensor& tensor) {
  if (!tensor.defined()) return std::nullopt;  // None, which the schema's parser lets pass for a tensor
  switch (tensor.scalar_type()) {
    case ScalarType::Float: return DType::kFloat32;
    case ScalarType::Half: return DType::kFloat16;
    case ScalarType::BFloat16: return DType::kBFloat16;
    case ScalarType::Float8_e4m3fn: return DType::kFloat8E4M3;
    case ScalarType::Float8_e5m2: return DType::kFloat8E5M2;
    case ScalarType::Int: return DType::kInt32;
    case ScalarType::Long: return DType::kInt64;
    case ScalarType::Byte: return DType::kUInt8;
    default: return std::nullopt;
  }
}

std::string dtype_text(const Tensor& tensor) {
  const std::optional<DType> known = known_dtype(tensor);
  if (known) return name_of(*known);
  if (!tensor.defined()) return "None";
  switch (tensor.scalar_type()) {  // by the names that Python shows
    case ScalarType::Double: return "float64";
    case ScalarType::Short: return "int16";
    case ScalarType::Char: return "int8";
    case ScalarType::Bool: return "bool";
    default: return torch::headeronly::toString(tensor.scalar_type());
  }
}

std::string device_text(const Tensor& tensor) {
  return tensor.is_cpu()    ? "cpu"
         : tensor.is_cuda() ? "cuda:" + std::to_string(tensor.get_device_index())
                            : "another device type";
}

std::string strides_text(const Tensor& tensor) {
  std::string text;
  for (int64_t axis = 0; axis < tensor.dim(); ++axis) text += (axis ? ", " : "") + std::to_string(tensor.stride(axis));
  return "[" + text + "]";
}

struct Axis {
  int64_t stride, steps;  // of an element to the next; to the last
  int64_t reach;          // of all axes with smaller strides
};

// Whether two elements of a tensor meet at one address: whether steps along its axes lead back to where they began.
class Meeting {
 public:
  // Axes of more than one element, without a stride of 0.
  explicit Meeting(std::vector<Axis> axes) : axes_(std::move(axes)) {
    std::sort(axes_.begin(), axes_.end(), [](const Axis& a, const Axis& b) { return a.stride > b.stride; });
    int64_t reach = 0;
    for (auto axis = axes_.rbegin(); axis != axes_.rend(); ++axis) {
      axis->reach = reach;
      reach += axis->stride * axis->steps;
    }
  }

  // What takes too many looks counts as meeting: nobody writes into such a tensor.
  bool happens() { return leads_back(0, 0, false); }

 private:
  static constexpr int kMostLooks = 1 << 14;

  // Whether steps along the axes from `first` on make up for `way`, behind axes along which some `moved`.
  bool leads_back(size_t first, int64_t way, bool moved) {
    if (first == axes_.size()) return way == 0 && moved;
    const auto [stride, steps, reach] = axes_[first];
    // Of a way and its opposite one is looked at.
    const int64_t least = moved ? std::max(-steps, ceil_of(-way - reach, stride)) : 0;
    const int64_t most = std::min(steps, floor_of(reach - way, stride));
    for (int64_t step = least; step <= most; ++step) {
      if (++looks_ > kMostLooks || leads_back(first + 1, way + step * stride, moved || step != 0)) return true;
    }
    return false;
  }

  static int64_t floor_of(int64_t a, int64_t b) { return a / b - (a % b < 0); }
  static int64_t ceil_of(int64_t a, int64_t b) { return a / b + (a % b > 0); }

  std::vector<Axis> axes_;
  int looks_ = 0;
};

template <class Values, class ToText>
std::string one_of(const Values& values, const ToText& to_text) {
  std::string text;
  for (const auto& value : values) text += (text.empty() ? "" : " or ") + std::string(to_text(value));
  return text;
}

}  // namespace

void fail(const char* op, const std::string& text) {
  throw std::runtime_error(std::string("attnops::") + op + ": " + text);
}

DType dtype_of(const Tensor& tensor) {
  const std::optional<DType> known = known_dtype(tensor);
  if (!known) throw std::runtime_error("attnops: no op takes dtype " + dtype_text(tensor));
  return *known;
}

bool has_dtype(const Tensor& tensor, DType dtype) { return known_dtype(tensor) == dtype; }

std::string shape_text(const Tensor& tensor) {
  std::string text;
  for (int64_t axis = 0; axis < tensor.dim(); ++axis) {
    text += (axis ? ", " : "") + std::to_string(tensor.size(axis));
  }
  return "[" + text + "]";
}

std::string TensorCheck::label() const { return name_; }

const TensorCheck& TensorCheck::dtype(std::initializer_list<DType> allowed) const {
  for (const DType candidate : allowed) {
    if (has_dtype(tensor_, candidate)) return *this;
  }
  fail(op_, label() + " must have dtype " + one_of(allowed, [](DType d) { return name_of(d); }) + ", got " +
                dtype_text(tensor_));
}

const TensorCheck& TensorCheck::dtype_as(const char* other_name, const Tensor& other) const {
  if (tensor_.scalar_type() != other.scalar_type()) {
    fail(op_, label() + " must have dtype " + dtype_text(other) + " as " + other_name + ", got " + dtype_text(tensor_));
  }
  return *this;
}

const TensorCheck& TensorCheck::device_as(const char* other_name, const Tensor& other) const {
  if (!tensor_.defined()) fail(op_, label() + " must be a tensor, got None");
  if (!other.defined()) fail(op_, std::string(other_name) + " must be a tensor, got None");
  if (tensor_.is_cpu() != other.is_cpu() || tensor_.get_device_index() != other.get_device_index()) {
    fail(op_, label() + " must be on " + device_text(other) + " as " + other_name + ", got " + device_text(tensor_));
  }
  return *this;
}

const TensorCheck& TensorCheck::rank(int64_t rank) const {
  if (tensor_.dim() != rank) {
    fail(op_, label() + " must have " + std::to_string(rank) + " dimensions, got " + std::to_string(tensor_.dim()) +
                  ", shape " + shape_text(tensor_));
  }
  return *this;
}

const TensorCheck& TensorCheck::shape(std::initializer_list<std::reference_wrapper<Dim>> dims) const {
  rank(static_cast<int64_t>(dims.size()));
  const auto sizes = tensor_.sizes();  // at once: each question to a tensor is a call into torch
  size_t axis = 0;
  bool has_elements = true;
  for (Dim& dim : dims) {
    match(dim, axis, sizes[axis]);
    has_elements = has_elements && sizes[axis] > 0;
    ++axis;
  }
  if (has_elements && tensor_.const_data_ptr() == nullptr && (tensor_.is_cpu() || tensor_.is_cuda())) {
    fail(op_, label() + " must have memory, and its storage was freed, shape " + shape_text(tensor_));
  }
  return *this;
}

const TensorCheck& TensorCheck::size_at_least(int64_t axis, const char* dim, int64_t least, const char* reason) const {
  if (tensor_.size(axis) < least) {
    fail(op_, label() + ".shape[" + std::to_string(axis) + "] (" + dim + ") must be at least " + std::to_string(least) +
                  " (" + reason + "), got " + std::to_string(tensor_.size(axis)));
  }
  return *this;
}

const TensorCheck& TensorCheck::dense_last() const {
  const int64_t last = tensor_.dim() - 1;
  if (last >= 0 && tensor_.size(last) > 1 && tensor_.stride(last) != 1) {
    fail(op_, label() + ".stride(" + std::to_string(last) + ") must be 1 (the last dimension is dense), got " +
                  std::to_string(tensor_.stride(last)));
  }
  return *this;
}

const TensorCheck& TensorCheck::contiguous() const {
  if (!tensor_.is_contiguous()) {
    fail(op_, label() + " must be contiguous, got strides of a view, shape " + shape_text(tensor_));
  }
  return *this;
}

const TensorCheck& TensorCheck::apart() const {
  const auto sizes = tensor_.sizes(), strides = tensor_.strides();
  int64_t reach = 0;  // of the axes behind
  bool nested = true;
  for (size_t axis = sizes.size(); axis-- > 0;) {
    if (sizes[axis] <= 1) continue;
    if (strides[axis] == 0) {
      fail(op_, label() + ".stride(" + std::to_string(axis) + ") must not be 0: it is written, and has " +
                    std::to_string(sizes[axis]) + " elements there, shape " + shape_text(tensor_));
    }
    nested = nested && strides[axis] > reach;
    reach += nested ? (sizes[axis] - 1) * strides[axis] : 0;
  }
  if (nested) return *this;
  std::vector<Axis> axes;
  for (size_t axis = 0; axis < sizes.size(); ++axis) {
    if (sizes[axis] == 0) return *this;
    if (sizes[axis] > 1) axes.push_back({strides[axis], sizes[axis] - 1, 0});
  }
  if (Meeting(std::move(axes)).happens()) {
    fail(op_, label() + " must not lie on itself: it is written, and two of its elements share an address, strides " +
                  strides_text(tensor_) + ", shape " + shape_text(tensor_));
  }
  return *this;
}

const TensorCheck& TensorCheck::aligned(int bytes) const {
  if (reinterpret_cast<uintptr_t>(tensor_.const_data_ptr()) % bytes != 0) {
    fail(op_, label() + " must start on a " + std::to_string(bytes) + "-byte boundary, got an offset of " +
                  std::to_string(reinterpret_cast<uintptr_t>(tensor_.const_data_ptr()) % bytes));
  }
  return *this;
}

void TensorCheck::match(Dim& dim, size_t axis, int64_t actual) const {
  if (!dim.extent_) {
    dim.extent_ = actual;
    dim.bound_by_ = name_;
  }
  if (*dim.extent_ != actual) {
    fail(op_, label() + ".shape[" + std::to_string(axis) + "] (" + dim.name_ + ") must be " +
                  std::to_string(*dim.extent_) + " as in " + dim.bound_by_ + ", got " + std::to_string(actual));
  }
}

void check_range(const char* op, const char* name, int64_t value, int64_t low, int64_t high) {
  if (value < low || value > high) {
    fail(op, std::string(name) + " must be in [" + std::to_string(low) + ", " + std::to_string(high) + "], got " +
                 std::to_string(value));
  }
}

void check_finite(const char* op, const char* name, double value) {
  if (std::isfinite(static_cast<float>(value))) return;
  char text[32];
  std::snprintf(text, sizeof text, "%g", value);
  fail(op, std::string(name) + " must be finite" + (std::isfinite(value) ? " in float32" : "") + ", got " + text);
}

}  // namespace attnops
