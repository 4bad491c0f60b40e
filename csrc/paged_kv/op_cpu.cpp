#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>

#include "paged_kv/checks.h"
#include "paged_kv/cpu/reference.h"
#include "torch_bindings/cpu_faults.h"

namespace attnops::paged_kv {
namespace {

// Work per task that outweighs its dispatch: cells of a table, bytes of a row.
constexpr int64_t kCellsPerTask = 4096;
constexpr int64_t kBytesPerTask = 32768;

template <class Run>
void parallel(int64_t count, int64_t grain, const Run& run) {
  torch::stable::parallel_for(0, count, max_of<int64_t>(grain, 1), run);
}

// Calls `run` with a value of the element type: the one place that maps DType to C++ types here.
template <class Run>
void dispatch(DType dtype, const Run& run) {
  if (dtype == DType::kFloat32) return run(float{});
  if (dtype == DType::kFloat16) return run(attnops::cpu::Float16{});
  run(attnops::cpu::BFloat16{});
}

// How many requests make a task; lengths are device data, so the widest row stands for all.
int64_t request_grain(const Requests& r) { return kCellsPerTask / max_of(r.max_tokens / r.page_size, 1); }

void build_page_table_cpu(const Tensor& page_table, const Tensor& req_to_token, const Tensor& req_pool_indices,
                          const Tensor& cache_seqlens, int64_t page_size, const OptionalTensor& slot_map,
                          const OptionalTensor& report) {
  PageTableParams params =
      checked_page_table(page_table, req_to_token, req_pool_indices, cache_seqlens, page_size, slot_map, report);
  CpuFaults faults("build_page_table", "", params.requests.report);
  params.requests.report = faults.report();
  parallel(params.requests.batch_size, request_grain(params.requests),
           [&](int64_t begin, int64_t end) { cpu::build_page_table(params, begin, end); });
  faults.check();
}

void build_kv_indices_cpu(const Tensor& kv_indptr, const Tensor& kv_indices, const OptionalTensor& kv_last_page_len,
                          const Tensor& req_to_token, const Tensor& req_pool_indices, const Tensor& cache_seqlens,
                          int64_t page_size, const OptionalTensor& slot_map, const OptionalTensor& report,
                          const OptionalTensor& kv_start_idx) {
  KvIndicesParams params = checked_kv_indices(kv_indptr, kv_indices, kv_last_page_len, req_to_token, req_pool_indices,
                                              cache_seqlens, page_size, slot_map, report, kv_start_idx);
  CpuFaults faults("build_kv_indices", "", params.requests.report);
  params.requests.report = faults.report();
  cpu::build_kv_indptr(params);
  parallel(params.requests.batch_size, request_grain(params.requests),
           [&](int64_t begin, int64_t end) { cpu::build_kv_indices(params, begin, end); });
  faults.check();
}

void build_cu_seqlens_cpu(const Tensor& cu_seqlens, const Tensor& seqlens) {
  cpu::build_cu_seqlens(checked_cu_seqlens(cu_seqlens, seqlens));
}

void translate_slots_cpu(const Tensor& out, const Tensor& slots, const Tensor& slot_map, const OptionalTensor& report) {
  const TranslateParams params = checked_translate(out, slots, slot_map, report);
  parallel(params.num_slots, kCellsPerTask,
           [&](int64_t begin, int64_t end) { cpu::translate_slots(params, begin, end); });
}

}  // namespace

void run_cpu(const StoreKvParams& params) {
  const int64_t row_bytes = int64_t{params.num_heads} * (params.k.head_dim + params.v.head_dim) * size_of(params.dtype);
  const int64_t grain = kBytesPerTask / max_of<int64_t>(row_bytes, 1);
  if (params.dtype == params.page_dtype) {
    parallel(params.target.num_tokens, grain, [&](int64_t begin, int64_t end) { cpu::copy_kv(params, begin, end); });
    return;
  }
  dispatch(params.dtype, [&](auto element) {
    using T = decltype(element);
    parallel(params.target.num_tokens, grain, [&](int64_t begin, int64_t end) {
      params.page_dtype == DType::kFloat8E5M2 ? cpu::quantize_kv<cpu::Float8E5M2, T>(params, begin, end)
                                              : cpu::quantize_kv<cpu::Float8E4M3, T>(params, begin, end);
    });
  });
}

void run_cpu(const StoreMlaParams& params) {
  const int64_t grain = kBytesPerTask / (kMlaDim * size_of(params.dtype));
  if (params.dtype == params.page_dtype) {
    parallel(params.target.num_tokens, grain, [&](int64_t begin, int64_t end) { cpu::copy_mla(params, begin, end); });
    return;
  }
  dispatch(params.dtype, [&](auto element) {
    using T = decltype(element);
    parallel(params.target.num_tokens, grain, [&](int64_t begin, int64_t end) {
      if (params.page_dtype == DType::kUInt8) return cpu::store_fp8_rows<T>(params, begin, end);
      params.page_dtype == DType::kFloat8E5M2 ? cpu::quantize_mla<cpu::Float8E5M2, T>(params, begin, end)
                                              : cpu::quantize_mla<cpu::Float8E4M3, T>(params, begin, end);
    });
  });
}

namespace {

void store_kv_cpu(const Tensor& k_pages, const Tensor& v_pages, const Tensor& k, const Tensor& v,
                  const Tensor& out_cache_loc, const OptionalTensor& k_scale, const OptionalTensor& v_scale,
                  const OptionalTensor& report) {
  run_cpu(checked_store_kv(k_pages, v_pages, k, v, out_cache_loc, k_scale, v_scale, report));
}

void store_mla_kv_cpu(const Tensor& kv_pages, const Tensor& latent, const OptionalTensor& k_pe,
                      const Tensor& out_cache_loc, const OptionalTensor& kv_scale, const OptionalTensor& report) {
  run_cpu(checked_store_mla(kv_pages, latent, k_pe, out_cache_loc, kv_scale, report));
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(attnops, CPU, m) {
  m.impl("build_page_table", TORCH_BOX(&build_page_table_cpu));
  m.impl("build_kv_indices", TORCH_BOX(&build_kv_indices_cpu));
  m.impl("build_cu_seqlens", TORCH_BOX(&build_cu_seqlens_cpu));
  m.impl("translate_slots", TORCH_BOX(&translate_slots_cpu));
  m.impl("store_kv", TORCH_BOX(&store_kv_cpu));
  m.impl("store_mla_kv", TORCH_BOX(&store_mla_kv_cpu));
}

}  // namespace attnops::paged_kv
