#pragma once
#include "core/linear_step.h"
#include "core/state_report.h"
#include "torch_bindings/check.h"
#include "torch_bindings/index_checks.h"

// What the ops of linear recurrences check alike: states in slots of a pool, and who uses which.
namespace attnops {

struct StateArguments {
  const Tensor &states, &tokens;
  const char* tokens_name;
  const Tensor& state_indices;
  const OptionalTensor& out_state_indices;
};

inline StepRows step_rows(const Tensor& tensor) {
  return {.data = tensor.const_data_ptr(), .stride_request = tensor.stride(0), .stride_head = tensor.stride(1)};
}

// Slots of a pool: int32 [B], on the tokens' device.
inline const int32_t* checked_slots(const char* op, const char* name, const Tensor& slots, const char* other_name,
                                    const Tensor& other, Dim& count) {
  TensorCheck(op, name, slots).device_as(other_name, other).dtype({DType::kInt32}).shape({count}).contiguous();
  return static_cast<const int32_t*>(slots.const_data_ptr());
}

// The part of LinearStep that extents and states give; the rest is zero.
inline LinearStep checked_states(const char* op, const StateArguments& given, Dim& batch, Dim& groups, Dim& heads,
                                 Dim& key_dim, Dim& value_dim) {
  Dim num_slots("num_slots");
  TensorCheck(op, "states", given.states)
      .device_as(given.tokens_name, given.tokens)
      .dtype({DType::kFloat32, DType::kFloat16, DType::kBFloat16})
      .shape({num_slots, heads, value_dim, key_dim})
      .dense_last();
  check_range(op, "key_dim", *key_dim, 1, kMaxStateDim);
  check_range(op, "value_dim", *value_dim, 1, kMaxStateDim);
  if (*groups == 0 ? *heads != 0 : *heads % *groups != 0) {
    fail(op, "the heads of values must be a multiple of those of keys, got " + std::to_string(*heads) + " and " +
                 std::to_string(*groups));
  }
  LinearStep p{};
  p.batch_size = batch.as_int();
  p.num_heads = heads.as_int();
  p.heads_per_group = *groups == 0 ? 1 : static_cast<int>(*heads / *groups);
  p.key_dim = key_dim.as_int();
  p.value_dim = value_dim.as_int();
  p.dtype = dtype_of(given.tokens);
  p.state_dtype = dtype_of(given.states);
  p.states = given.states.mutable_data_ptr();
  p.num_slots = *num_slots;
  p.stride_slot = given.states.stride(0);
  p.stride_head = given.states.stride(1);
  p.stride_row = given.states.stride(2);
  p.state_indices = checked_slots(op, "state_indices", given.state_indices, given.tokens_name, given.tokens, batch);
  if (given.out_state_indices) {
    p.out_state_indices =
        checked_slots(op, "out_state_indices", *given.out_state_indices, given.tokens_name, given.tokens, batch);
  }
  return p;
}

// An optional float32 value per head.
inline const float* checked_per_head(const char* op, const char* name, const OptionalTensor& values,
                                     const char* other_name, const Tensor& other, Dim& heads) {
  if (!values) return nullptr;
  TensorCheck(op, name, *values).device_as(other_name, other).dtype({DType::kFloat32}).shape({heads}).contiguous();
  return static_cast<const float*>(values->const_data_ptr());
}

}  // namespace attnops
