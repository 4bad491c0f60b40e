#include <torch/csrc/stable/library.h>

#include "ssd/checks.h"
#include "ssd/cuda/launch.h"
#include "ssd/impls.h"
#include "torch_bindings/stream.h"

namespace attnops::ssd {
namespace {

void ssd_decode_cuda(const Tensor& out, const Tensor& states, const Tensor& x, const OptionalTensor& dt,
                     const Tensor& a, const Tensor& b, const Tensor& c, const OptionalTensor& d,
                     const OptionalTensor& dt_bias, const OptionalTensor& z, const Tensor& state_indices,
                     const OptionalTensor& out_state_indices, double scale, bool dt_softplus,
                     const OptionalTensor& report) {
  const LinearStep p = checked_decode(
      {out, states, x, dt, a, b, c, d, dt_bias, z, state_indices, out_state_indices, scale, dt_softplus, report});
  const OnDevice guard(x);
  launch(p, current_stream(x));
}

void ssd_prefill_cuda(const Tensor& out, const Tensor& states, const Tensor& x, const OptionalTensor& dt,
                      const Tensor& a, const Tensor& b, const Tensor& c, const OptionalTensor& d,
                      const OptionalTensor& dt_bias, const OptionalTensor& z, const Tensor& cu_seqlens,
                      const Tensor& prefix_lens, const Tensor& state_indices, const OptionalTensor& checkpoint_slots,
                      const OptionalTensor& plan, const OptionalTensor& scratch, double scale, bool dt_softplus,
                      const OptionalTensor& report, bool cut_prompts) {
  const OptionalTensor elsewhere;
  const LinearPrefill p = checked_prefill(
      {out, states, x, dt, a, b, c, d, dt_bias, z, state_indices, elsewhere, scale, dt_softplus, report},
      {cu_seqlens, prefix_lens, checkpoint_slots, plan, scratch, cut_prompts});
  const OnDevice guard(x);
  if (p.num_tokens * p.step.num_heads != 0) select_prefill(p)(p, current_stream(x));
}

void ssd_plan_cuda(const Tensor& plan, const Tensor& cu_seqlens) {
  const OnDevice guard(plan);
  launch_plan(checked_plan("ssd_plan", plan, cu_seqlens), current_stream(plan));
}

void ssd_verify_cuda(const Tensor& out, const Tensor& ring_u, const Tensor& ring_k, const Tensor& ring_decay,
                     const Tensor& states, const Tensor& ring_len, const Tensor& x, const OptionalTensor& dt,
                     const Tensor& a, const Tensor& b, const Tensor& c, const OptionalTensor& d,
                     const OptionalTensor& dt_bias, const OptionalTensor& z, const Tensor& state_indices,
                     const OptionalTensor& tree_mask, double scale, bool dt_softplus, const OptionalTensor& report) {
  const OptionalTensor elsewhere;
  const LinearVerify p = checked_verify(
      "ssd_verify", {out, states, x, dt, a, b, c, d, dt_bias, z, state_indices, elsewhere, scale, dt_softplus, report},
      {ring_u, ring_k, ring_decay, ring_len}, tree_mask);
  const OnDevice guard(x);
  launch_verify(p, current_stream(x));
}

void ssd_commit_cuda(const Tensor& states, const Tensor& ring_u, const Tensor& ring_k, const Tensor& ring_decay,
                     const Tensor& ring_len, const Tensor& state_indices, const Tensor& accepted_path,
                     const Tensor& accepted_len, bool fold, const OptionalTensor& report) {
  const LinearCommit p = checked_commit(
      "ssd_commit",
      {states, {ring_u, ring_k, ring_decay, ring_len}, state_indices, accepted_path, accepted_len, fold, report});
  const OnDevice guard(states);
  launch_commit(p, current_stream(states));
}

void ssd_draft_step_cuda(const Tensor& out, const Tensor& ring_u, const Tensor& ring_k, const Tensor& ring_decay,
                         const Tensor& states, const Tensor& ring_len, const Tensor& x, const OptionalTensor& dt,
                         const Tensor& a, const Tensor& b, const Tensor& c, const OptionalTensor& d,
                         const OptionalTensor& dt_bias, const OptionalTensor& z, const Tensor& state_indices,
                         const Tensor& accepted_path, const Tensor& accepted_len, const OptionalTensor& tree_mask,
                         double scale, bool dt_softplus, const OptionalTensor& semaphores,
                         const OptionalTensor& report) {
  const OptionalTensor elsewhere;
  const LinearDraftStep p = checked_draft_step(
      {out, states, x, dt, a, b, c, d, dt_bias, z, state_indices, elsewhere, scale, dt_softplus, report},
      {ring_u, ring_k, ring_decay, ring_len}, tree_mask, {accepted_path, accepted_len, semaphores});
  const OnDevice guard(x);
  launch_draft_step(p, current_stream(x));
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(attnops, CUDA, m) {
  m.impl("ssd_decode", TORCH_BOX(&ssd_decode_cuda));
  m.impl("ssd_prefill", TORCH_BOX(&ssd_prefill_cuda));
  m.impl("ssd_plan", TORCH_BOX(&ssd_plan_cuda));
  m.impl("ssd_verify", TORCH_BOX(&ssd_verify_cuda));
  m.impl("ssd_commit", TORCH_BOX(&ssd_commit_cuda));
  m.impl("ssd_draft_step", TORCH_BOX(&ssd_draft_step_cuda));
}

}  // namespace attnops::ssd
