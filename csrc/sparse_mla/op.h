#pragma once
#include "sparse_mla/checks.h"

namespace attnops::sparse_mla {

// The ops on any device, in the schema's order: checked, then run by `kRun(params, q)`.
template <void (*kRun)(const Params&, const Tensor&)>
void sparse_mla_decode(const Tensor& out, const OptionalTensor& lse, const Tensor& q, const OptionalTensor& q_pe,
                       const Tensor& kv_pages, const Tensor& indices, const OptionalTensor& topk_length,
                       const OptionalTensor& extra_kv_pages, const OptionalTensor& extra_indices,
                       const OptionalTensor& extra_topk_length, const Tensor& tile_scheduler_metadata,
                       const Tensor& num_splits, const Tensor& out_partial, const Tensor& lse_partial,
                       const Tensor& semaphores, double softmax_scale, const OptionalTensor& sinks,
                       int64_t fixed_split_tokens, const OptionalTensor& report, bool rounded_keys) {
  Tokens tokens(kDecode, true);
  const Arguments arguments{.out = out,
                            .lse = lse,
                            .q = q,
                            .q_pe = q_pe,
                            .kv_name = "kv_pages",
                            .kv = kv_pages,
                            .indices = indices,
                            .topk_length = topk_length,
                            .softmax_scale = softmax_scale,
                            .sinks = sinks,
                            .report = report};
  Params p = checked_arguments(arguments, tokens, kReportSparseMlaDecode);
  check_extra(tokens, p, arguments, {"extra_kv_pages", extra_kv_pages, extra_indices, extra_topk_length});
  p.fp8_products = rounded_keys;  // rounded_keys.h
  check_call_plan(p, q,
                  {tile_scheduler_metadata, num_splits, out_partial, lse_partial, semaphores, fixed_split_tokens});
  kRun(p, q);
}

// The same, by `kRun(params, scratch, q)`.
template <void (*kRun)(const Params&, const Scratch&, const Tensor&)>
void sparse_mla_prefill(const Tensor& out, const OptionalTensor& lse, const OptionalTensor& max_logits, const Tensor& q,
                        const OptionalTensor& q_pe, const Tensor& kv, const Tensor& indices,
                        const OptionalTensor& topk_length, const OptionalTensor& extra_kv,
                        const OptionalTensor& extra_indices, const OptionalTensor& extra_topk_length,
                        double softmax_scale, const OptionalTensor& sinks, const OptionalTensor& report,
                        const OptionalTensor& head_masks, int64_t head_groups, const OptionalTensor& scratch) {
  Tokens tokens(kPrefill, false);
  const Arguments arguments{.out = out,
                            .lse = lse,
                            .q = q,
                            .q_pe = q_pe,
                            .kv_name = "kv",
                            .kv = kv,
                            .indices = indices,
                            .topk_length = topk_length,
                            .softmax_scale = softmax_scale,
                            .sinks = sinks,
                            .report = report};
  Params p = checked_arguments(arguments, tokens, kReportSparseMlaPrefill);
  p.max_logits = checked_per_head(arguments, tokens, "max_logits", max_logits);
  check_extra(tokens, p, arguments, {"extra_kv", extra_kv, extra_indices, extra_topk_length});
  check_head_masks(tokens, p, arguments, head_masks, head_groups, extra_kv.has_value());
  kRun(p, checked_scratch(p, scratch, q), q);
}

}  // namespace attnops::sparse_mla
