#pragma once
#include "core/linear_step.h"
#include "torch_bindings/check.h"
#include "torch_bindings/linear_checks.h"

namespace attnops::delta_rule {

struct RowArguments {
  const Tensor &out, &states, &q, &k, &v, &a, &b;
  const OptionalTensor &a_log, &dt_bias;
  const Tensor& state_indices;
  const OptionalTensor& out_state_indices;
  double scale, lower_bound;
  bool normalize;
  const OptionalTensor& report;
};

// What rows of any form bring beside q, k, v and out.
struct RecurrenceArguments {
  const Tensor &tokens, &states, &a, &b;
  const char* tokens_name;
  const OptionalTensor &a_log, &dt_bias;
  const Tensor& state_indices;
  const OptionalTensor& out_state_indices;
  double scale, lower_bound;
  bool normalize;
  const OptionalTensor& report;
};

// Gates, states and options; where q, k, v and out lie is not filled in.
inline LinearStep checked_recurrence(const char* op, const RecurrenceArguments& given, Dim& rows, Dim& batch,
                                     Dim& groups, Dim& heads, Dim& key_dim, Dim& value_dim) {
  const char* tokens_name = given.tokens_name;
  const bool per_channel = given.a.dim() == 3;
  const auto gate = [&](const char* name, const Tensor& tensor) {
    return gate_check(op, name, tensor, tokens_name, given.tokens);
  };
  if (per_channel) {
    gate("a", given.a).shape({rows, heads, key_dim}).dense_last();
  } else {
    gate("a", given.a).shape({rows, heads});
  }
  gate("b", given.b).shape({rows, heads});
  LinearStep p =
      checked_states(op, {given.states, given.tokens, tokens_name, given.state_indices, given.out_state_indices}, batch,
                     groups, heads, key_dim, value_dim);
  if (!given.a_log && (given.dt_bias || given.lower_bound != 0.)) {
    fail(op,
         "A_log must be given with dt_bias or lower_bound: without it a is the log of the decay; zeros stand for none");
  }
  if (given.dt_bias) {
    const TensorCheck bias(op, "dt_bias", *given.dt_bias);
    bias.device_as(tokens_name, given.tokens).dtype({DType::kFloat32}).contiguous();
    per_channel ? bias.shape({heads, key_dim}) : bias.shape({heads});
  }
  check_finite(op, "scale", given.scale);
  check_finite(op, "lower_bound", given.lower_bound);
  if (given.lower_bound > 0.)
    fail(op, "lower_bound must be 0 (none) or below, got " + std::to_string(given.lower_bound));

  p.gate_dtype = same_gate_dtype(op, "a", given.a, "b", given.b);
  p.a = step_rows(given.a);
  p.b = step_rows(given.b);
  p.gate_per_channel = per_channel;
  p.a_log = checked_per_head(op, "A_log", given.a_log, tokens_name, given.tokens, heads);
  p.dt_bias = data_or_null<const float>(given.dt_bias);
  p.lower_bound = static_cast<float>(given.lower_bound);
  p.scale = static_cast<float>(given.scale);
  p.normalize = given.normalize;
  p.report = checked_report(op, given.report, tokens_name, given.tokens);
  return p;
}

// The contract of rows, for every op and device: one a request, or one a token.
inline LinearStep checked_rows(const char* op, const RowArguments& given, Dim& rows, Dim& batch) {
  Dim groups("num_k_heads"), heads("num_v_heads"), key_dim("key_dim"), value_dim("value_dim");
  TensorCheck(op, "q", given.q)
      .dtype({DType::kFloat32, DType::kFloat16, DType::kBFloat16})
      .shape({rows, groups, key_dim})
      .dense_last();
  const auto like_q = [&](const char* name, const Tensor& tensor) {
    return TensorCheck(op, name, tensor).device_as("q", given.q).dtype_as("q", given.q);
  };
  like_q("k", given.k).shape({rows, groups, key_dim}).dense_last();
  like_q("v", given.v).shape({rows, heads, value_dim}).dense_last();
  like_q("out", given.out).shape({rows, heads, value_dim}).dense_last().apart();
  LinearStep p =
      checked_recurrence(op,
                         {given.q, given.states, given.a, given.b, "q", given.a_log, given.dt_bias, given.state_indices,
                          given.out_state_indices, given.scale, given.lower_bound, given.normalize, given.report},
                         rows, batch, groups, heads, key_dim, value_dim);
  p.q = step_rows(given.q);
  p.k = step_rows(given.k);
  p.v = step_rows(given.v);
  set_step_out(p, given.out);
  return p;
}

// The whole contract of `delta_decode`, for every device.
inline LinearStep checked_decode(const RowArguments& given) {
  Dim batch("batch_size");
  return checked_rows("delta_decode", given, batch, batch);
}

inline LinearPrefill checked_prefill(const RowArguments& given, const PrefillArguments& ragged) {
  Dim num_tokens("num_tokens"), batch("batch_size");
  const LinearStep step = checked_rows("delta_prefill", given, num_tokens, batch);
  return attnops::checked_prefill("delta_prefill", step, true, ragged, "q", given.q, num_tokens, batch);
}

inline LinearVerify checked_verify(const char* op, const RowArguments& given, const RingArguments& rings,
                                   const OptionalTensor& tree_mask) {
  Dim num_tokens("num_tokens"), batch("batch_size");
  const LinearStep step = checked_rows(op, given, num_tokens, batch);
  LinearVerify p = attnops::checked_verify(op, step, rings, tree_mask, "q", given.q, *num_tokens);
  if (*num_tokens != 0) check_ring_kind(op, p, given.a.dim() == 3, step.num_heads / step.heads_per_group);
  return p;
}

inline LinearDraftStep checked_draft_step(const RowArguments& given, const RingArguments& rings,
                                          const OptionalTensor& tree_mask, const AcceptedArguments& accepted) {
  constexpr const char* kOp = "delta_draft_step";
  return attnops::checked_draft_step(kOp, checked_verify(kOp, given, rings, tree_mask), accepted, given.states);
}

}  // namespace attnops::delta_rule
