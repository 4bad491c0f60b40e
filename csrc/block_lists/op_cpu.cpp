#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>

#include "block_lists/cpu/label_scores.h"
#include "block_lists/cpu/reference.h"
#include "block_lists/op.h"
#include "torch_bindings/cpu_faults.h"

namespace attnops::block_lists {
namespace {

void run(const Params& given, const Tensor&) {
  Params p = given;
  CpuFaults faults("build_block_tables", "k_pages", p.report);
  p.report = faults.report();
  faults.check_lengths(kReportBuildBlockTables, p.page_table, p.cache_seqlens, p.num_requests);
  torch::stable::parallel_for(0, p.num_rows * p.num_kv_heads, 16, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) cpu::build_row(p, i / p.num_kv_heads, i % p.num_kv_heads);
  });
  faults.check();
}

template <typename T>
void score(const ScoreParams& p) {
  constexpr int64_t kRun = 1024;  // keys of a task
  const int64_t runs = ceil_div(p.columns, kRun), heads = p.num_kv_heads;
  torch::stable::parallel_for(0, p.num_requests * heads * runs, 1, [&](int64_t begin, int64_t end) {
    for (int64_t task = begin; task < end; ++task) {
      const int request = static_cast<int>(task / runs / heads), head = static_cast<int>(task / runs % heads);
      const int64_t first = task % runs * kRun, keys = scored_keys(p, request);
      cpu::score_keys<T>(p, request, head, first, min_of(first + kRun, keys));
    }
  });
}

void label_scores_cpu(const Tensor& scores, const Tensor& q_labels, const Tensor& label_pages, const Tensor& page_table,
                      const Tensor& cache_seqlens, const OptionalTensor& report) {
  ScoreParams p = checked_scores(scores, q_labels, label_pages, page_table, cache_seqlens, report);
  CpuFaults faults("label_scores", "label_pages", p.report);
  p.report = faults.report();
  faults.check_lengths(kReportLabelScores, p.page_table, p.cache_seqlens, p.num_requests);
  for (int request = 0; request < p.num_requests; ++request) report_columns(p, request);
  faults.check();
  if (p.dtype == DType::kFloat32) score<float>(p);
  if (p.dtype == DType::kFloat16) score<attnops::cpu::Float16>(p);
  if (p.dtype == DType::kBFloat16) score<attnops::cpu::BFloat16>(p);
  faults.check();
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(attnops, CPU, m) {
  m.impl("build_block_tables", TORCH_BOX(&build_block_tables<&run>));
  m.impl("label_scores", TORCH_BOX(&label_scores_cpu));
}

}  // namespace attnops::block_lists
