#include <torch/csrc/stable/library.h>

#include "delta_rule/checks.h"
#include "delta_rule/cuda/launch.h"
#include "delta_rule/impls.h"
#include "torch_bindings/stream.h"

namespace attnops::delta_rule {
namespace {

void delta_decode_cuda(const Tensor& out, const Tensor& states, const Tensor& q, const Tensor& k, const Tensor& v,
                       const Tensor& a, const Tensor& b, const OptionalTensor& a_log, const OptionalTensor& dt_bias,
                       const Tensor& state_indices, const OptionalTensor& out_state_indices, double scale,
                       double lower_bound, bool qk_l2norm, const OptionalTensor& report) {
  const LinearStep p = checked_decode({out, states, q, k, v, a, b, a_log, dt_bias, state_indices, out_state_indices,
                                       scale, lower_bound, qk_l2norm, report});
  const OnDevice guard(q);
  launch(p, current_stream(q));
}

void delta_prefill_cuda(const Tensor& out, const Tensor& states, const Tensor& q, const Tensor& k, const Tensor& v,
                        const Tensor& a, const Tensor& b, const OptionalTensor& a_log, const OptionalTensor& dt_bias,
                        const Tensor& cu_seqlens, const Tensor& prefix_lens, const Tensor& state_indices,
                        const OptionalTensor& checkpoint_slots, const OptionalTensor& plan,
                        const OptionalTensor& scratch, double scale, double lower_bound, bool qk_l2norm,
                        const OptionalTensor& report, bool cut_prompts) {
  const OptionalTensor elsewhere;
  const LinearPrefill p = checked_prefill(
      {out, states, q, k, v, a, b, a_log, dt_bias, state_indices, elsewhere, scale, lower_bound, qk_l2norm, report},
      {cu_seqlens, prefix_lens, checkpoint_slots, plan, scratch, cut_prompts});
  const OnDevice guard(q);
  if (p.num_tokens * p.step.num_heads != 0) select_prefill(p)(p, current_stream(q));
}

void delta_plan_cuda(const Tensor& plan, const Tensor& cu_seqlens) {
  const OnDevice guard(plan);
  launch_plan(checked_plan("delta_plan", plan, cu_seqlens), current_stream(plan));
}

void delta_verify_cuda(const Tensor& out, const Tensor& ring_u, const Tensor& ring_k, const Tensor& ring_decay,
                       const Tensor& states, const Tensor& ring_len, const Tensor& q, const Tensor& k, const Tensor& v,
                       const Tensor& a, const Tensor& b, const OptionalTensor& a_log, const OptionalTensor& dt_bias,
                       const Tensor& state_indices, const OptionalTensor& tree_mask, double scale, double lower_bound,
                       bool qk_l2norm, const OptionalTensor& report) {
  const OptionalTensor elsewhere;
  const LinearVerify p = checked_verify(
      "delta_verify",
      {out, states, q, k, v, a, b, a_log, dt_bias, state_indices, elsewhere, scale, lower_bound, qk_l2norm, report},
      {ring_u, ring_k, ring_decay, ring_len}, tree_mask);
  const OnDevice guard(q);
  launch_verify(p, current_stream(q));
}

void delta_commit_cuda(const Tensor& states, const Tensor& ring_u, const Tensor& ring_k, const Tensor& ring_decay,
                       const Tensor& ring_len, const Tensor& state_indices, const Tensor& accepted_path,
                       const Tensor& accepted_len, bool fold, const OptionalTensor& report) {
  const LinearCommit p = checked_commit(
      "delta_commit",
      {states, {ring_u, ring_k, ring_decay, ring_len}, state_indices, accepted_path, accepted_len, fold, report});
  const OnDevice guard(states);
  launch_commit(p, current_stream(states));
}

void delta_draft_step_cuda(const Tensor& out, const Tensor& ring_u, const Tensor& ring_k, const Tensor& ring_decay,
                           const Tensor& states, const Tensor& ring_len, const Tensor& q, const Tensor& k,
                           const Tensor& v, const Tensor& a, const Tensor& b, const OptionalTensor& a_log,
                           const OptionalTensor& dt_bias, const Tensor& state_indices, const Tensor& accepted_path,
                           const Tensor& accepted_len, const OptionalTensor& tree_mask, double scale,
                           double lower_bound, bool qk_l2norm, const OptionalTensor& semaphores,
                           const OptionalTensor& report) {
  const OptionalTensor elsewhere;
  const LinearDraftStep p = checked_draft_step(
      {out, states, q, k, v, a, b, a_log, dt_bias, state_indices, elsewhere, scale, lower_bound, qk_l2norm, report},
      {ring_u, ring_k, ring_decay, ring_len}, tree_mask, {accepted_path, accepted_len, semaphores});
  const OnDevice guard(q);
  launch_draft_step(p, current_stream(q));
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(attnops, CUDA, m) {
  m.impl("delta_decode", TORCH_BOX(&delta_decode_cuda));
  m.impl("delta_prefill", TORCH_BOX(&delta_prefill_cuda));
  m.impl("delta_plan", TORCH_BOX(&delta_plan_cuda));
  m.impl("delta_verify", TORCH_BOX(&delta_verify_cuda));
  m.impl("delta_commit", TORCH_BOX(&delta_commit_cuda));
  m.impl("delta_draft_step", TORCH_BOX(&delta_draft_step_cuda));
}

}  // namespace attnops::delta_rule
