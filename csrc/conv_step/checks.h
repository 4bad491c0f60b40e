#pragma once
#include "causal_conv1d/checks.h"
#include "delta_rule/checks.h"
#include "ssd/checks.h"

namespace attnops::conv_step {

// A step whose q, k and v are the convolution's output. Its channels are those of all heads of q, then of k, then of v;
// in a state space of v first, then of k (B), then of q (C).
struct ConvDecode {
  causal_conv1d::Params conv;
  LinearStep step;
  bool delta;

  int groups() const { return step.num_heads / step.heads_per_group; }

  // Elements of all heads.
  int64_t keys() const { return int64_t{groups()} * step.key_dim; }
  int64_t values() const { return int64_t{step.num_heads} * step.value_dim; }

  // The first channels of the three.
  int64_t query_channel() const { return delta ? 0 : values() + keys(); }
  int64_t key_channel() const { return delta ? keys() : values(); }
  int64_t value_channel() const { return delta ? 2 * keys() : 0; }

  // Where that output lies: rows `stride` elements apart.
  template <typename T>
  void put_rows(T* rows, int64_t stride) {
    conv.out = rows;
    conv.stride_out = stride;
    step.q = {.data = rows + query_channel(), .stride_request = stride, .stride_head = step.key_dim};
    step.k = {.data = rows + key_channel(), .stride_request = stride, .stride_head = step.key_dim};
    step.v = {.data = rows + value_channel(), .stride_request = stride, .stride_head = step.value_dim};
  }
};

// The contract of both ops, but for `mixed`. `checked_step` has the recurrence's own.
template <typename CheckedStep>
ConvDecode checked_conv_decode(const char* op, ReportOp report_op, bool delta, const char* groups_name,
                               int64_t num_groups, const Tensor& out, const causal_conv1d::Arguments& convolution,
                               const CheckedStep& checked_step) {
  check_range(op, groups_name, num_groups, 1, INT32_MAX);
  Dim batch("batch_size"), channels("channels"), groups(groups_name, num_groups, groups_name);
  Dim heads(delta ? "num_v_heads" : "num_heads"), key_dim(delta ? "key_dim" : "state_dim"),
      value_dim(delta ? "value_dim" : "head_dim");
  ConvDecode p;
  p.delta = delta;
  p.conv = causal_conv1d::checked_inputs(op, report_op, convolution, batch, batch, channels);
  p.conv.tokens_per_request = 1;
  TensorCheck(op, "out", out)
      .device_as("x", convolution.x)
      .dtype_as("x", convolution.x)
      .shape({batch, heads, value_dim})
      .dense_last()
      .apart();
  p.step = checked_step(batch, groups, heads, key_dim, value_dim);
  set_step_out(p.step, out);
  const int64_t width = 2 * p.keys() + p.values();
  if (*channels != width) {
    fail(op, "x.shape[1] must be " + std::to_string(width) +
                 (delta ? " (num_k_heads x key_dim twice, and num_v_heads x value_dim), got "
                        : " (num_heads x head_dim, and num_groups x state_dim twice), got ") +
                 std::to_string(*channels));
  }
  if (p.conv.num_slots != p.step.num_slots) {
    fail(op, "conv_states.shape[0] must be " + std::to_string(p.step.num_slots) + " (num_slots of states), got " +
                 std::to_string(p.conv.num_slots));
  }
  return p;
}

inline ConvDecode checked_delta(const Tensor& out, const causal_conv1d::Arguments& convolution,
                                const delta_rule::RecurrenceArguments& given, int64_t num_k_heads) {
  const char* op = "delta_conv_decode";
  return checked_conv_decode(op, kReportDeltaConvDecode, true, "num_k_heads", num_k_heads, out, convolution,
                             [&](Dim& batch, Dim& groups, Dim& heads, Dim& key_dim, Dim& value_dim) {
                               return delta_rule::checked_recurrence(op, given, batch, batch, groups, heads, key_dim,
                                                                     value_dim);
                             });
}

inline ConvDecode checked_ssd(const Tensor& out, const causal_conv1d::Arguments& convolution,
                              const ssd::RecurrenceArguments& given, int64_t num_groups) {
  const char* op = "ssd_conv_decode";
  return checked_conv_decode(op, kReportSsdConvDecode, false, "num_groups", num_groups, out, convolution,
                             [&](Dim& batch, Dim& groups, Dim& heads, Dim& key_dim, Dim& value_dim) {
                               return ssd::checked_recurrence(op, given, batch, batch, groups, heads, key_dim,
                                                              value_dim);
                             });
}

// Room for what is convolved, between two launches.
inline void check_mixed(const char* op, const ConvDecode& p, const Tensor& x, const OptionalTensor& mixed) {
  if (!mixed) return;
  Dim batch("batch_size", p.step.batch_size, "x"), channels("channels", p.conv.channels, "x");
  TensorCheck(op, "mixed", *mixed).device_as("x", x).dtype_as("x", x).shape({batch, channels}).contiguous();
}

}  // namespace attnops::conv_step
