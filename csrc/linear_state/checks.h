#pragma once
#include "linear_state/params.h"
#include "torch_bindings/check.h"
#include "torch_bindings/linear_checks.h"

namespace attnops::linear_state {

// Elements of a slot of a pool, which has no gaps in it.
inline int64_t checked_slot(const char* op, const std::string& name, const Tensor& pool) {
  int64_t elements = 1;
  for (int64_t axis = pool.dim() - 1; axis >= 2; --axis) {
    if (pool.size(axis) != 1 && pool.stride(axis) != elements && elements > 0) {
      fail(op, name + " must hold each slot without gaps: stride " + std::to_string(axis) + " must be " +
                   std::to_string(elements) + ", got " + std::to_string(pool.stride(axis)));
    }
    elements *= pool.size(axis);
  }
  return elements;
}

// Another pool to copy from: as `states`, but for the number of slots.
inline void add_source(const char* op, Params& p, const Tensor& states, const Tensor& source) {
  TensorCheck(op, "source", source)
      .device_as("states", states)
      .dtype_as("states", states)
      .rank(static_cast<int64_t>(states.dim()));
  for (int64_t axis = 0; axis < states.dim(); ++axis) {
    if (axis != 1 && source.size(axis) != states.size(axis)) {
      fail(op, "source.shape[" + std::to_string(axis) + "] must be " + std::to_string(states.size(axis)) +
                   " as in states, got " + std::to_string(source.size(axis)) + ", shape " + shape_text(source));
    }
  }
  checked_slot(op, "source", source);
  const int64_t size = size_of(dtype_of(source));
  p.source = source.const_data_ptr();
  p.source_slots = source.size(1);
  p.source_stride_layer = source.stride(0) * size;
  p.source_stride_slot = source.stride(1) * size;
  p.within = false;
}

// The contract of `copy_states` and, without `src`, of `clear_states`, for every device.
inline Params checked_params(const char* op, ReportOp report_op, const Tensor& states, const Tensor* src,
                             const Tensor& dst, const char* dst_name, const OptionalTensor& report,
                             const OptionalTensor& source) {
  TensorCheck(op, "states", states).dtype({DType::kFloat32, DType::kFloat16, DType::kBFloat16});
  if (states.dim() < 2) {
    fail(op, "states must have at least 2 dimensions, [num_layers, num_slots, ...], got shape " + shape_text(states));
  }
  TensorCheck(op, "states", states).has_memory().apart();
  const int64_t elements = checked_slot(op, "states", states);
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
  p.source = p.states;
  p.source_slots = p.num_slots;
  p.source_stride_layer = p.stride_layer;
  p.source_stride_slot = p.stride_slot;
  p.within = true;
  if (source) add_source(op, p, states, *source);
  p.count = *count;
  p.op = report_op;
  p.report = checked_report(op, report, "states", states);
  return p;
}

}  // namespace attnops::linear_state
