#pragma once
#include "core/linear_prefill.h"
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
  check_range(op, "states.shape[3] (key_dim)", *key_dim, 1, kMaxStateDim);
  check_range(op, "states.shape[2] (value_dim)", *value_dim, 1, kMaxStateDim);
  if (*groups == 0 ? *heads != 0 : *heads % *groups != 0) {
    fail(op, "the heads of values must be a multiple of those of keys, got " + std::to_string(*heads) + " and " +
                 std::to_string(*groups));
  }
  LinearStep p{};
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
  p.batch_size = batch.as_int();
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

struct PrefillArguments {
  const Tensor &cu_seqlens, &prefix_lens;
  const OptionalTensor &checkpoint_slots, &plan;
};

// A step whose rows are the tokens of ragged requests.
inline LinearPrefill checked_prefill(const char* op, const LinearStep& step, const PrefillArguments& given,
                                     const char* other_name, const Tensor& other, Dim& num_tokens, Dim& batch) {
  LinearPrefill p{};
  p.step = step;
  p.num_tokens = *num_tokens;
  Dim bounds("batch_size + 1", *batch + 1, "state_indices"), max_checkpoints("max_checkpoints");
  p.cu_seqlens = checked_slots(op, "cu_seqlens", given.cu_seqlens, other_name, other, bounds);
  p.prefix_lens = checked_slots(op, "prefix_lens", given.prefix_lens, other_name, other, batch);
  if (given.checkpoint_slots) {
    TensorCheck(op, "checkpoint_slots", *given.checkpoint_slots)
        .device_as(other_name, other)
        .dtype({DType::kInt32})
        .shape({batch, max_checkpoints})
        .dense_last();
    p.checkpoint_slots = static_cast<const int32_t*>(given.checkpoint_slots->const_data_ptr());
    p.max_checkpoints = *max_checkpoints;
    p.stride_checkpoints = given.checkpoint_slots->stride(0);
  }
  if (given.plan) p.plan = checked_slots(op, "plan", *given.plan, other_name, other, batch);
  return p;
}

inline RequestOrder checked_plan(const char* op, const Tensor& plan, const Tensor& cu_seqlens) {
  Dim batch("batch_size");
  TensorCheck(op, "plan", plan).dtype({DType::kInt32}).shape({batch}).contiguous();
  Dim bounds("batch_size + 1", *batch + 1, "plan");
  return {.plan = static_cast<int32_t*>(plan.mutable_data_ptr()),
          .cu_seqlens = checked_slots(op, "cu_seqlens", cu_seqlens, "plan", plan, bounds),
          .batch_size = batch.as_int()};
}

}  // namespace attnops
