#pragma once
#include "core/linear_step.h"
#include "torch_bindings/check.h"
#include "torch_bindings/linear_checks.h"

namespace attnops::ssd {

struct RowArguments {
  const Tensor &out, &states, &x;
  const OptionalTensor& dt;
  const Tensor &a, &b, &c;
  const OptionalTensor &d, &dt_bias, &z;
  const Tensor& state_indices;
  const OptionalTensor& out_state_indices;
  double scale;
  bool softplus;
  const OptionalTensor& report;
};

// What rows of any form bring beside x, B, C and out.
struct RecurrenceArguments {
  const Tensor &tokens, &states;
  const OptionalTensor& dt;
  const Tensor& a;
  const OptionalTensor &d, &dt_bias, &z;
  const Tensor& state_indices;
  const OptionalTensor& out_state_indices;
  double scale;
  bool softplus;
  const OptionalTensor& report;
};

// Steps, states and options; where B, C, x and out lie is not filled in.
inline LinearStep checked_recurrence(const char* op, const RecurrenceArguments& given, Dim& rows, Dim& batch,
                                     Dim& groups, Dim& heads, Dim& key_dim, Dim& value_dim) {
  if (given.dt) gate_check(op, "dt", *given.dt, "x", given.tokens).shape({rows, heads});
  if (given.z) {
    TensorCheck(op, "z", *given.z)
        .device_as("x", given.tokens)
        .dtype_as("x", given.tokens)
        .shape({rows, heads, value_dim})
        .dense_last();
  }
  LinearStep p = checked_states(op, {given.states, given.tokens, "x", given.state_indices, given.out_state_indices},
                                batch, groups, heads, key_dim, value_dim);
  p.a_log = checked_per_head(op, "A", given.a, "x", given.tokens, heads);
  p.dt_bias = checked_per_head(op, "dt_bias", given.dt_bias, "x", given.tokens, heads);
  p.skip = checked_per_head(op, "D", given.d, "x", given.tokens, heads);
  if (!given.dt && (given.dt_bias || given.softplus)) {
    fail(op, "dt must be given with dt_bias or dt_softplus: without it every step has length 1");
  }
  check_finite(op, "scale", given.scale);

  p.gate_dtype = given.dt ? dtype_of(*given.dt) : p.dtype;
  if (given.dt) p.a = step_rows(*given.dt);
  if (given.z) p.z = step_rows(*given.z);
  p.scale = static_cast<float>(given.scale);
  p.softplus = given.softplus;
  p.report = checked_report(op, given.report, "x", given.tokens);
  return p;
}

// The contract of rows, for every op and device: one a request, or one a token. B and C are the keys and queries of the
// recurrence.
inline LinearStep checked_rows(const char* op, const RowArguments& given, Dim& rows, Dim& batch) {
  Dim groups("num_groups"), heads("num_heads"), key_dim("state_dim"), value_dim("head_dim");
  TensorCheck(op, "x", given.x)
      .dtype({DType::kFloat32, DType::kFloat16, DType::kBFloat16})
      .shape({rows, heads, value_dim})
      .dense_last();
  const auto like_x = [&](const char* name, const Tensor& tensor) {
    return TensorCheck(op, name, tensor).device_as("x", given.x).dtype_as("x", given.x);
  };
  like_x("out", given.out).shape({rows, heads, value_dim}).dense_last().apart();
  like_x("B", given.b).shape({rows, groups, key_dim}).dense_last();
  like_x("C", given.c).shape({rows, groups, key_dim}).dense_last();
  LinearStep p =
      checked_recurrence(op,
                         {given.x, given.states, given.dt, given.a, given.d, given.dt_bias, given.z,
                          given.state_indices, given.out_state_indices, given.scale, given.softplus, given.report},
                         rows, batch, groups, heads, key_dim, value_dim);
  p.q = step_rows(given.c);
  p.k = step_rows(given.b);
  p.v = step_rows(given.x);
  set_step_out(p, given.out);
  return p;
}

// The whole contract of `ssd_decode`, for every device.
inline LinearStep checked_decode(const RowArguments& given) {
  Dim batch("batch_size");
  return checked_rows("ssd_decode", given, batch, batch);
}

inline LinearPrefill checked_prefill(const RowArguments& given, const PrefillArguments& ragged) {
  Dim num_tokens("num_tokens"), batch("batch_size");
  const LinearStep step = checked_rows("ssd_prefill", given, num_tokens, batch);
  return attnops::checked_prefill("ssd_prefill", step, false, ragged, "x", given.x, num_tokens, batch);
}

inline LinearVerify checked_verify(const char* op, const RowArguments& given, const RingArguments& rings,
                                   const OptionalTensor& tree_mask) {
  Dim num_tokens("num_tokens"), batch("batch_size");
  const LinearStep step = checked_rows(op, given, num_tokens, batch);
  LinearVerify p = attnops::checked_verify(op, step, rings, tree_mask, "x", given.x, *num_tokens);
  if (*num_tokens != 0) check_ring_kind(op, p, false, step.num_heads / step.heads_per_group);
  return p;
}

inline LinearDraftStep checked_draft_step(const RowArguments& given, const RingArguments& rings,
                                          const OptionalTensor& tree_mask, const AcceptedArguments& accepted) {
  constexpr const char* kOp = "ssd_draft_step";
  return attnops::checked_draft_step(kOp, checked_verify(kOp, given, rings, tree_mask), accepted, given.states);
}

}  // namespace attnops::ssd
