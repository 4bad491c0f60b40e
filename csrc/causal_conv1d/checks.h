#pragma once
#include "causal_conv1d/params.h"
#include "torch_bindings/check.h"
#include "torch_bindings/linear_checks.h"

namespace attnops::causal_conv1d {

struct Arguments {
  const Tensor &out, &conv_states, &x, &weight;
  const OptionalTensor& bias;
  const Tensor& state_indices;
  bool silu;
  const OptionalTensor& report;
};

// All but where the output goes, of which `given.out` is not looked at.
inline Params checked_inputs(const char* op, ReportOp report_op, const Arguments& given, Dim& batch, Dim& num_tokens,
                             Dim& channels) {
  Dim width("width"), num_slots("num_slots");
  TensorCheck(op, "x", given.x)
      .dtype({DType::kFloat32, DType::kFloat16, DType::kBFloat16})
      .shape({num_tokens, channels})
      .dense_last();
  const auto like_x = [&](const char* name, const Tensor& tensor) {
    return TensorCheck(op, name, tensor).device_as("x", given.x).dtype_as("x", given.x);
  };
  like_x("weight", given.weight).shape({channels, width}).contiguous();
  check_range(op, "weight.shape[1] (width)", *width, 2, kMaxWidth);
  Dim history("width - 1", *width - 1, "weight");
  like_x("conv_states", given.conv_states).shape({num_slots, channels, history}).apart();
  if (given.bias) like_x("bias", *given.bias).shape({channels}).contiguous();
  Params p{};
  p.state_indices = checked_slots(op, "state_indices", given.state_indices, "x", given.x, batch);
  p.x = given.x.const_data_ptr();
  p.num_tokens = *num_tokens;
  p.channels = *channels;
  p.stride_x = given.x.stride(0);
  p.states = given.conv_states.mutable_data_ptr();
  p.num_slots = *num_slots;
  p.stride_slot = given.conv_states.stride(0);
  p.stride_channel = given.conv_states.stride(1);
  p.stride_time = given.conv_states.stride(2);
  p.weight = given.weight.const_data_ptr();
  p.bias = given.bias ? given.bias->const_data_ptr() : nullptr;
  p.width = width.as_int();
  p.silu = given.silu;
  p.dtype = dtype_of(given.x);
  p.batch_size = *batch;
  p.op = report_op;
  p.report = checked_report(op, given.report, "x", given.x);
  return p;
}

inline Params checked_params(const char* op, ReportOp report_op, const Arguments& given, Dim& batch, Dim& num_tokens) {
  Dim channels("channels");
  Params p = checked_inputs(op, report_op, given, batch, num_tokens, channels);
  TensorCheck(op, "out", given.out)
      .device_as("x", given.x)
      .dtype_as("x", given.x)
      .shape({num_tokens, channels})
      .dense_last()
      .apart();
  p.out = given.out.mutable_data_ptr();
  p.stride_out = given.out.stride(0);
  return p;
}

// Ragged tokens: requests bounded by `cu_seqlens`.
inline Params checked_varlen(const Arguments& given, const Tensor& cu_seqlens,
                             const OptionalTensor& has_initial_state) {
  const char* op = "causal_conv1d";
  Dim batch("batch_size"), num_tokens("num_tokens");
  Params p = checked_params(op, kReportCausalConv1d, given, batch, num_tokens);
  Dim bounds("batch_size + 1", *batch + 1, "state_indices");
  p.cu_seqlens = checked_slots(op, "cu_seqlens", cu_seqlens, "x", given.x, bounds);
  if (has_initial_state) {
    TensorCheck(op, "has_initial_state", *has_initial_state)
        .device_as("x", given.x)
        .dtype({DType::kUInt8})
        .shape({batch})
        .contiguous();
    p.has_initial_state = static_cast<const uint8_t*>(has_initial_state->const_data_ptr());
  }
  return p;
}

// The same number of tokens for each request, which all have a state.
inline Params checked_update(const Arguments& given, Dim& batch, Dim& num_tokens) {
  const char* op = "causal_conv1d_update";
  Params p = checked_params(op, kReportCausalConv1dUpdate, given, batch, num_tokens);
  if (*batch == 0 ? *num_tokens != 0 : *num_tokens % *batch != 0) {
    fail(op, "x.shape[0] must be a multiple of " + std::to_string(*batch) + " (batch_size of state_indices), got " +
                 std::to_string(*num_tokens));
  }
  p.tokens_per_request = *batch == 0 ? 0 : *num_tokens / *batch;
  return p;
}

inline Params checked_update(const Arguments& given) {
  Dim batch("batch_size"), num_tokens("num_tokens");
  return checked_update(given, batch, num_tokens);
}

// The same where the tokens are drafts, whose windows are asked for.
inline DraftParams checked_drafts(const Arguments& given, const Tensor& windows, const OptionalTensor& tree_mask) {
  const char* op = "causal_conv1d_update";
  Dim batch("batch_size"), num_tokens("num_tokens");
  DraftParams p{};
  p.conv = checked_update(given, batch, num_tokens);
  check_range(op, "drafts of a request", p.conv.tokens_per_request, 0, kMaxDrafts);
  p.drafts = static_cast<int>(p.conv.tokens_per_request);
  Dim channels("channels", p.conv.channels, "x"), history("width - 1", p.conv.width - 1, "weight");
  Dim drafts = *batch == 0 ? Dim("drafts") : Dim("drafts", p.drafts, "x");  // of no request: any number
  TensorCheck(op, "windows", windows)
      .device_as("x", given.x)
      .dtype_as("x", given.x)
      .shape({batch, drafts, channels, history})
      .apart();
  p.windows = windows.mutable_data_ptr();
  p.stride_request = windows.stride(0);
  p.stride_draft = windows.stride(1);
  p.stride_channel = windows.stride(2);
  p.stride_time = windows.stride(3);
  if (tree_mask) {
    Dim bytes("ceil(drafts / 8)", (*drafts + 7) / 8, "windows");
    TensorCheck(op, "tree_mask", *tree_mask)
        .device_as("x", given.x)
        .dtype({DType::kUInt8})
        .shape({batch, drafts, bytes})
        .contiguous();
    p.tree_mask = static_cast<const uint8_t*>(tree_mask->const_data_ptr());
  }
  return p;
}

// A tree leaves no one state, so nothing could be done with the old one.
inline void refuse_mask_alone(const OptionalTensor& tree_mask) {
  if (tree_mask) {
    fail("causal_conv1d_update",
         "windows must be given with tree_mask: a tree leaves a state for each draft, got None");
  }
}

}  // namespace attnops::causal_conv1d
