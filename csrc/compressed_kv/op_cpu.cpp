#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>

#include "compressed_kv/checks.h"
#include "compressed_kv/cpu/entry_values_loops.h"
#include "compressed_kv/cpu/reference.h"
#include "cpu/isa.h"
#include "torch_bindings/cpu_faults.h"

namespace attnops::compressed_kv {
namespace {

cpu::EntryValues entry_values() {
  const Isa isa = attnops::cpu::current_isa();
  return isa == Isa::kScalar ? &cpu::entry_values_here
         : isa == Isa::kAvx2 ? &cpu::avx2_entry_values
                             : &cpu::avx512_entry_values;
}

void compress_plan_cpu(const Tensor& entry_indptr, const Tensor& cache_seqlens, const Tensor& cu_seqlens_q,
                       int64_t ratio, const OptionalTensor& report) {
  const PlanParams p = checked_plan(entry_indptr, cache_seqlens, cu_seqlens_q, ratio, report);
  CpuFaults faults("compress_plan", "", p.report);
  for (int64_t request = 0; request < p.batch_size; ++request) {
    report_request(faults.report(), kReportCompressPlan, p.cu_seqlens_q, p.cache_seqlens, request, INT32_MAX);
  }
  faults.check();
  cpu::plan(p);
}

void compress_kv_cpu(const Tensor& kv_pages, const Tensor& state, const Tensor& kv_score, const Tensor& ape,
                     const Tensor& norm_weight, const Tensor& cos_sin, const Tensor& page_table,
                     const Tensor& state_indices, const Tensor& cache_seqlens, const Tensor& cu_seqlens_q,
                     const Tensor& entry_indptr, int64_t ratio, double eps, bool interleaved, bool hadamard, bool ue8m0,
                     const OptionalTensor& report) {
  Params p =
      checked_params({kv_pages, state, kv_score, ape, norm_weight, cos_sin, page_table, state_indices, cache_seqlens,
                      cu_seqlens_q, entry_indptr, ratio, eps, interleaved, hadamard, ue8m0, report});
  CpuFaults faults("compress_kv", "page_table", p.report);
  p.report = faults.report();
  for (int64_t request = 0; request < p.batch_size; ++request) report_request(p, request, p.report);
  faults.check();
  const cpu::Tools tools{entry_values(), attnops::cpu::row_rounding()};
  torch::stable::parallel_for(0, most_entries(p), 1,
                              [&](int64_t begin, int64_t end) { cpu::compress(p, tools, begin, end); });
  torch::stable::parallel_for(0, p.batch_size, 1, [&](int64_t begin, int64_t end) { cpu::keep(p, begin, end); });
  faults.check();
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(attnops, CPU, m) {
  m.impl("compress_plan", TORCH_BOX(&compress_plan_cpu));
  m.impl("compress_kv", TORCH_BOX(&compress_kv_cpu));
}

}  // namespace attnops::compressed_kv
