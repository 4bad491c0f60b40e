#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>

#include "cpu/partials.h"
#include "cpu/split_kv_plan.h"
#include "mla_decode/cpu/kernel.h"
#include "mla_decode/op.h"
#include "torch_bindings/cpu_faults.h"

namespace attnops::mla_decode {
namespace {

// Plan rows per task of the merge: enough that a task outweighs its dispatch.
constexpr int64_t kMergeGrain = 16;

void mla_decode_plan_cpu(const Tensor& tile_scheduler_metadata, const Tensor& num_splits, const Tensor& cache_seqlens,
                         int64_t seqlen_q, int64_t num_q_heads, int64_t window_left, int64_t fixed_split_tokens) {
  const PlanParams p = checked_plan_params(tile_scheduler_metadata, num_splits, cache_seqlens, seqlen_q, num_q_heads,
                                           window_left, fixed_split_tokens);
  const attnops::cpu::SplitKvPlanner planner(p.geometry, p.tensors.cache_seqlens);
  planner.write(p.tensors.tile_scheduler_metadata, p.tensors.num_splits);
}

// Lengths can be read here for nothing, so a plan of another step is an error and not a wrong answer. What the call
// reads is its own plan.
attnops::cpu::SplitKvPlanner::Plan checked_plan_of(const Params& p) {
  const SplitKvGeometry geometry =
      plan_geometry(p.batch_size, p.seqlen_q, p.num_q_heads, p.window_left, p.num_sm_parts, p.fixed_split_tokens);
  auto plan = attnops::cpu::SplitKvPlanner(geometry, p.cache_seqlens).plan();
  if (!plan.matches(p.tile_scheduler_metadata, p.num_splits)) {
    fail(kOp,
         "tile_scheduler_metadata is not the plan of these cache_seqlens, seqlen_q, num_q_heads, window_left and "
         "fixed_split_tokens: run mla_decode_plan");
  }
  // Checked mode records it, as on a GPU.
  if (!p.report) check_room_for_cuts(kOp, geometry, p.cache_seqlens, plan.num_splits.data(), p.num_partials);
  return plan;
}

}  // namespace

void run_cpu(Params p) {
  if (p.batch_size == 0) return;
  CpuFaults faults(kOp, "kv_pages", p.report);
  faults.check_lengths(ReportOp::kMlaDecode, p.page_table, p.cache_seqlens, p.batch_size);
  const auto plan = checked_plan_of(p);
  p.tile_scheduler_metadata = plan.tile_scheduler_metadata.data();
  p.num_splits = plan.num_splits.data();
  p.report = faults.report();
  const int64_t partial_rows = p.num_partials * kPlanRows;
  const attnops::cpu::Partials partials(p.out_partial, partial_rows * kHeadDimV, p.lse_partial, partial_rows,
                                        p.semaphores);
  p.out_partial = partials.out();
  p.lse_partial = partials.lse();
  const cpu::Kernel kernel = cpu::select_kernel(p);
  torch::stable::parallel_for(0, p.num_sm_parts, 1, [&](int64_t begin, int64_t end) {
    for (int64_t part = begin; part < end; ++part) cpu::run_part(p, static_cast<int>(part), kernel);
  });

  if (p.fixed_split_tokens == 0) {
    const int64_t rows = static_cast<int64_t>(p.num_sm_parts) * kPlanRows;
    torch::stable::parallel_for(0, rows, kMergeGrain, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) {
        cpu::merge_balanced(p, static_cast<int>(i / kPlanRows), static_cast<int>(i % kPlanRows));
      }
    });
  } else {
    const int64_t rows = static_cast<int64_t>(p.seqlen_q) * p.num_q_heads;
    torch::stable::parallel_for(0, p.batch_size * rows, kMergeGrain, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) {
        cpu::merge_fixed(p, static_cast<int>(i / rows), static_cast<int>(i % rows));
      }
    });
  }
  faults.check();
}

namespace {

void run_on_cpu(const Params& params, const Tensor&) { run_cpu(params); }

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(attnops, CPU, m) {
  m.impl("mla_decode_plan", TORCH_BOX(&mla_decode_plan_cpu));
  m.impl("mla_decode", TORCH_BOX(&mla_decode<&run_on_cpu>));
}

}  // namespace attnops::mla_decode
