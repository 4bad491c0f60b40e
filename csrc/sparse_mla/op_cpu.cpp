#include <torch/csrc/stable/library.h>

#include <vector>

#include "cpu/split_kv_plan.h"
#include "sparse_mla/op.h"

namespace attnops::sparse_mla {
namespace {

void sparse_mla_plan_cpu(const Tensor& tile_scheduler_metadata, const Tensor& num_splits,
                         const OptionalTensor& topk_length, const OptionalTensor& extra_topk_length, int64_t topk,
                         int64_t extra_topk, int64_t seqlen_q, int64_t num_q_heads, int64_t fixed_split_tokens) {
  const PlanParams p = checked_plan(tile_scheduler_metadata, num_splits, topk_length, extra_topk_length, topk,
                                    extra_topk, seqlen_q, num_q_heads, fixed_split_tokens);
  std::vector<int32_t> keys;
  for (int token = 0; token < p.geometry.num_requests; ++token) {
    keys.push_back(ListKeys(p.selected, p.extra, token).end);
  }
  attnops::cpu::SplitKvPlanner(p.geometry, keys.data()).write(p.tile_scheduler_metadata, p.num_splits);
}

void decode_on_cpu(const Params& params, const Tensor&) { run_cpu(params); }
void prefill_on_cpu(const Params& params, const Tensor&) { run_unplanned_on_cpu(params); }

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(attnops, CPU, m) {
  m.impl("sparse_mla_plan", TORCH_BOX(&sparse_mla_plan_cpu));
  m.impl("sparse_mla_decode", TORCH_BOX(&sparse_mla_decode<&decode_on_cpu>));
  m.impl("sparse_mla_prefill", TORCH_BOX(&sparse_mla_prefill<&prefill_on_cpu>));
}

}  // namespace attnops::sparse_mla
