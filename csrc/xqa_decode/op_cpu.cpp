#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>

#include "core/report.h"
#include "cpu/isa.h"
#include "cpu/split_kv_plan.h"
#include "xqa_decode/cpu/driver.h"
#include "xqa_decode/op.h"

namespace attnops::xqa_decode {
namespace {

void xqa_decode_plan_cpu(const Tensor& tile_scheduler_metadata, const Tensor& num_splits, const Tensor& cache_seqlens,
                         int64_t seqlen_q, int64_t num_kv_heads, int64_t window_left, int64_t fixed_split_tokens) {
  const PlanParams plan = checked_plan_params(tile_scheduler_metadata, num_splits, cache_seqlens, seqlen_q,
                                              num_kv_heads, window_left, fixed_split_tokens);
  attnops::cpu::SplitKvPlanner(plan.geometry, plan.tensors.cache_seqlens)
      .write(plan.tensors.tile_scheduler_metadata, plan.tensors.num_splits);
}

// Planning again costs microseconds here, and a stale plan would be a wrong answer.
void check_plan_is_of(const Params& params) {
  const SplitKvGeometry geometry = plan_geometry(params.batch_size, params.seqlen_q, params.num_kv_heads,
                                                 params.window_left, params.num_sm_parts, params.fixed_split_tokens);
  const attnops::cpu::SplitKvPlanner planner(geometry, params.cache_seqlens);
  if (!planner.matches(params.tile_scheduler_metadata, params.num_splits)) {
    fail("xqa_decode",
         "tile_scheduler_metadata and num_splits are not the plan of these cache_seqlens, seqlen_q, num_kv_heads, "
         "window_left and fixed_split_tokens: run xqa_decode_plan before");
  }
  // Checked mode records it, as on a GPU.
  if (!params.report) {
    check_room_for_cuts("xqa_decode", geometry, params.cache_seqlens, params.num_splits, params.num_partials);
  }
}

// The kernels skip what a bad index or length would make them read. With a report that is the caller's affair; without
// one it is an error, after the fact.
void check_no_fault(const int32_t* report) {
  if (report[kReportCount] == 0) return;
  const auto text = [&](ReportSlot slot) { return std::to_string(report[slot]); };
  if (report[kReportKind] == static_cast<int32_t>(ReportKind::kLength)) {
    fail("xqa_decode", "cache_seqlens[" + text(kReportRequest) + "] must be below " + text(kReportLimit) +
                           " (the tokens that its page_table row holds), got " + text(kReportValue));
  }
  fail("xqa_decode", "page_table, request " + text(kReportRequest) + ", page " + text(kReportPosition) +
                         " must be in [0, " + text(kReportLimit) + ") (num_pages of k_pages), got " +
                         text(kReportValue));
}

}  // namespace

void run_cpu(Params params) {
  const cpu::TileKernel& kernel =
      cpu::select_tile_kernel({attnops::cpu::current_isa(), params.dtype, params.kv_dtype, params.head_dim});
  check_plan_is_of(params);

  int32_t faults[kReportSize] = {};
  if (!params.report) params.report = faults;

  const auto for_each = [](int64_t count, const auto& run) {
    torch::stable::parallel_for(0, count, 1, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) run(static_cast<int>(i));
    });
  };
  for_each(params.num_sm_parts, [&](int part) { cpu::run_part(params, kernel, part); });
  if (params.fixed_split_tokens != 0) {
    const int64_t works = int64_t{params.batch_size} * params.num_kv_heads;
    for_each(works, [&](int work) { cpu::merge_fixed(params, kernel, work); });
  } else {
    for_each(params.num_sm_parts, [&](int part) { cpu::merge_balanced(params, kernel, part); });
  }
  check_no_fault(faults);
}

namespace {

void run_on_cpu(const Params& params, const Tensor&) { run_cpu(params); }

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(attnops, CPU, m) {
  m.impl("xqa_decode_plan", TORCH_BOX(&xqa_decode_plan_cpu));
  m.impl("xqa_decode", TORCH_BOX(&xqa_decode<&run_on_cpu>));
}

}  // namespace attnops::xqa_decode
