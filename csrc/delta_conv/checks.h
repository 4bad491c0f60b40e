#pragma once
#include "causal_conv1d/checks.h"
#include "delta_rule/checks.h"

namespace attnops::delta_conv {

// A step whose q, k and v are the convolution's output: its channels are those of all heads of q, then of k, then of v.
struct ConvDecode {
  causal_conv1d::Params conv;
  LinearStep step;

  // Where that output lies: rows `stride` elements apart.
  template <typename T>
  void put_rows(T* rows, int64_t stride) {
    const int64_t keys = step.key_dim, groups = step.num_heads / step.heads_per_group;
    conv.out = rows;
    conv.stride_out = stride;
    step.q = {.data = rows, .stride_request = stride, .stride_head = keys};
    step.k = {.data = rows + groups * keys, .stride_request = stride, .stride_head = keys};
    step.v = {.data = rows + 2 * groups * keys, .stride_request = stride, .stride_head = step.value_dim};
  }
};

// The whole contract of `delta_conv_decode`, but for `mixed`.
inline ConvDecode checked_conv_decode(const Tensor& out, const causal_conv1d::Arguments& convolution,
                                      const delta_rule::RecurrenceArguments& given, int64_t num_k_heads) {
  const char* op = "delta_conv_decode";
  check_range(op, "num_k_heads", num_k_heads, 1, INT32_MAX);
  Dim batch("batch_size"), channels("channels");
  Dim groups("num_k_heads", num_k_heads, "num_k_heads"), heads("num_v_heads"), key_dim("key_dim"),
      value_dim("value_dim");
  ConvDecode p;
  p.conv = causal_conv1d::checked_inputs(op, kReportDeltaConvDecode, convolution, batch, batch, channels);
  p.conv.tokens_per_request = 1;
  TensorCheck(op, "out", out)
      .device_as("x", given.tokens)
      .dtype_as("x", given.tokens)
      .shape({batch, heads, value_dim})
      .dense_last()
      .apart();
  p.step = delta_rule::checked_recurrence(op, given, batch, batch, groups, heads, key_dim, value_dim);
  delta_rule::set_out(p.step, out);
  const int64_t width = 2 * *groups * *key_dim + *heads * *value_dim;
  if (*channels != width) {
    fail(op, "x.shape[1] must be " + std::to_string(width) +
                 " (num_k_heads x key_dim twice, and num_v_heads x value_dim), got " + std::to_string(*channels));
  }
  if (p.conv.num_slots != p.step.num_slots) {
    fail(op, "conv_states.shape[0] must be " + std::to_string(p.step.num_slots) + " (num_slots of states), got " +
                 std::to_string(p.conv.num_slots));
  }
  return p;
}

}  // namespace attnops::delta_conv
