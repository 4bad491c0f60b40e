#pragma once
#include "linear_state/params.h"
#include "torch_bindings/check.h"
#include "torch_bindings/linear_checks.h"

namespace attnops::linear_state {

// The contract of `copy_states` and, without `src`, of `clear_states`, for every device.
inline Params checked_params(const char* op, ReportOp report_op, const Tensor& states, const Tensor* src,
                             const Tensor& dst, const char* dst_name, const OptionalTensor& report) {
  TensorCheck(op, "states", states).dtype({DType::kFloat32, DType::kFloat16, DType::kBFloat16});
  if (states.dim() < 2) {
    fail(op, "states must have at least 2 dimensions, [num_layers, num_slots, ...], got shape " + shape_text(states));
  }
  TensorCheck(op, "states", states).has_memory().apart();
  int64_t elements = 1;
  for (int64_t axis = states.dim() - 1; axis >= 2; --axis) {
    if (states.size(axis) != 1 && states.stride(axis) != elements && elements > 0) {
      fail(op, "states must hold each slot without gaps: stride " + std::to_string(axis) + " must be " +
                   std::to_string(elements) + ", got " + std::to_string(states.stride(axis)));
    }
    elements *= states.size(axis);
  }
  Dim count("count");
  Params p{};
  p.dst = checked_slots(op, dst_name, dst, "states", states, count);
  if (src != nullptr) p.src = checked_slots(op, "src", *src, "states", states, count);
  const int64_t size = size_of(dtype_of(states));
  p.states = states.mutable_data_ptr();
  p.num_layers = states.size(0);
  p.num_slots = states.size(1);
  p.slot_bytes = elements * size;
  p.stride_layer = states.stride(0) * size;
  p.stride_slot = states.stride(1) * size;
  p.count = *count;
  p.op = report_op;
  p.report = checked_report(op, report, "states", states);
  return p;
}

}  // namespace attnops::linear_state
