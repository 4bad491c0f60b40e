#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>

#include "fp4_kv/cpu/reference.h"
#include "fp4_kv/op.h"
#include "torch_bindings/cpu_faults.h"

namespace attnops::fp4_kv {
namespace {

// Calls `run` with a value of the element type: the one place that maps DType to C++ types here.
template <class Run>
void dispatch(DType dtype, const Run& run) {
  if (dtype == DType::kFloat32) return run(float{});
  if (dtype == DType::kFloat16) return run(attnops::cpu::Float16{});
  run(attnops::cpu::BFloat16{});
}

void store_cpu(const StoreParams& given, const Tensor&) {
  StoreParams p = given;
  CpuFaults faults("store_kv_fp4", "out_cache_loc", p.report);
  p.report = faults.report();
  dispatch(p.dtype, [&](auto element) {
    torch::stable::parallel_for(0, p.slots.size, 16,
                                [&](int64_t begin, int64_t end) { cpu::store<decltype(element)>(p, begin, end); });
  });
  faults.check();
}

void decode_cpu(const DecodeParams& given, const Tensor&) {
  DecodeParams p = given;
  if (p.num_splits != 0) fail("fp4_decode", "out_partial must be None on a CPU, which splits no keys");
  CpuFaults faults("fp4_decode", p.page_table.kv_indptr ? "kv_indices" : "page_table", p.report);
  p.report = faults.report();
  faults.check_lengths(kReportFp4Decode, p.page_table, p.cache_seqlens, p.batch_size);
  dispatch(p.dtype, [&](auto element) {
    torch::stable::parallel_for(0, int64_t{p.batch_size} * p.num_kv_heads, 1,
                                [&](int64_t begin, int64_t end) { cpu::decode<decltype(element)>(p, begin, end); });
  });
  faults.check();
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(attnops, CPU, m) {
  m.impl("store_kv_fp4", TORCH_BOX(&store_op<&store_cpu>));
  m.impl("fp4_decode", TORCH_BOX(&decode_op<&decode_cpu>));
}

}  // namespace attnops::fp4_kv
