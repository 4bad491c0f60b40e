#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>

#include <string>
#include <vector>

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
  const attnops::cpu::SplitKvPlanner planner(p.geometry, p.tensors.cache_seqlens, true);
  planner.write(p.tensors.tile_scheduler_metadata, p.tensors.num_splits);
}

const char* name_of_op(const Params& p) {
  if (!p.selects) return kOp;
  return p.report_op == kReportSparseMlaDecode ? "sparse_mla_decode" : "sparse_mla_prefill";
}

// Lengths can be read here for nothing, so a plan of another step is an error and not a wrong answer. What the call
// reads is its own plan.
attnops::cpu::SplitKvPlanner::Plan checked_plan_of(const Params& p) {
  const SplitKvGeometry geometry =
      plan_geometry(p.batch_size, p.seqlen_q, p.num_q_heads, p.window_left, p.num_sm_parts, p.fixed_split_tokens);
  std::vector<int32_t> keys;  // of the lists
  for (int request = 0; p.selects && request < p.batch_size; ++request)
    keys.push_back(cpu::keys_of_request(p, request));
  const int32_t* lengths = p.selects ? keys.data() : p.cache_seqlens;
  auto plan = attnops::cpu::SplitKvPlanner(geometry, lengths, !p.selects).plan();
  if (!plan.matches(p.tile_scheduler_metadata, p.num_splits)) {
    const std::string of = p.selects ? "lengths, topk, extra_topk, num_q_heads and fixed_split_tokens"
                                     : "cache_seqlens, seqlen_q, num_q_heads, window_left and fixed_split_tokens";
    const std::string planner = p.selects ? "sparse_mla_plan" : "mla_decode_plan";
    fail(name_of_op(p), "tile_scheduler_metadata is not the plan of these " + of + ": run " + planner);
  }
  // Checked mode records it, as on a GPU.
  if (!p.report) check_room_for_cuts(name_of_op(p), geometry, lengths, plan.num_splits.data(), p.num_partials);
  return plan;
}

void check_list_lengths(const Params& p, CpuFaults& faults) {
  const auto check = [&](const SelectedRows& rows, ReportKind kind) {
    for (int request = 0; rows.lengths && request < p.batch_size; ++request) {
      const int length = rows.lengths[request];
      if (length <= rows.count) continue;
      record_fault(faults.report(), {p.report_op, kind, request, 0, length, int64_t{rows.count} + 1});
    }
    faults.check();
  };
  check(p.selected, kReportListLength);
  check(p.extra, kReportExtraListLength);
}

void check_lengths(const Params& p, CpuFaults& faults) {
  if (p.selects) return check_list_lengths(p, faults);
  faults.check_lengths(ReportOp::kMlaDecode, p.page_table, p.cache_seqlens, p.batch_size);
}

}  // namespace

void run_cpu(Params p) {
  if (p.batch_size == 0) return;
  CpuFaults faults(name_of_op(p), "kv_pages", p.report);
  check_lengths(p, faults);
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

void run_unplanned_on_cpu(Params p) {
  CpuFaults faults(name_of_op(p), "kv", p.report);
  check_lengths(p, faults);
  p.report = faults.report();
  const cpu::Kernel kernel = cpu::select_kernel(p);
  const int blocks = blocks_per_request(p.seqlen_q, p.num_q_heads);
  torch::stable::parallel_for(0, int64_t{p.batch_size} * blocks, 1, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      cpu::run_whole(p, static_cast<int>(i / blocks), static_cast<int>(i % blocks), kernel);
    }
  });
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
