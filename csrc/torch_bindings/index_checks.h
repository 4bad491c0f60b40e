#pragma once
#include "core/report.h"
#include "core/slots.h"
#include "torch_bindings/check.h"

// Arguments that ops over slots and requests have in common.
namespace attnops {

inline int32_t* checked_report(const char* op, const OptionalTensor& report, const char* other_name,
                               const Tensor& other) {
  if (!report) return nullptr;
  Dim size("report_size", kReportSize, "core/report.h");
  TensorCheck(op, "report", *report).device_as(other_name, other).dtype({DType::kInt32}).shape({size}).contiguous();
  return static_cast<int32_t*>(report->mutable_data_ptr());
}

// int32 or int64 [extent], any stride.
inline IndexArray checked_indices(const char* op, const char* name, const Tensor& tensor, Dim& extent,
                                  const char* other_name, const Tensor& other) {
  TensorCheck(op, name, tensor).device_as(other_name, other).dtype({DType::kInt32, DType::kInt64}).shape({extent});
  return {.data = address_of<const void>(tensor),
          .stride = tensor.stride(0),
          .size = tensor.size(0),
          .wide = has_dtype(tensor, DType::kInt64)};
}

}  // namespace attnops
