#pragma once
#include "compressed_kv/params.h"
#include "torch_bindings/check.h"
#include "torch_bindings/index_checks.h"
#include "torch_bindings/linear_checks.h"

// The ops' whole contract, checked once for all devices.
namespace attnops::compressed_kv {

inline PlanParams checked_plan(const Tensor& entry_indptr, const Tensor& cache_seqlens, const Tensor& cu_seqlens_q,
                               int64_t ratio, const OptionalTensor& report) {
  const char *op = "compress_plan", *home = "cache_seqlens";
  Dim batch("batch_size");
  PlanParams p{};
  p.cache_seqlens = checked_slots(op, home, cache_seqlens, home, cache_seqlens, batch);
  Dim bounds("batch_size + 1", *batch + 1, home);
  p.cu_seqlens_q = checked_slots(op, "cu_seqlens_q", cu_seqlens_q, home, cache_seqlens, bounds);
  checked_slots(op, "entry_indptr", entry_indptr, home, cache_seqlens, bounds);
  p.entry_indptr = static_cast<int32_t*>(entry_indptr.mutable_data_ptr());
  check_range(op, "ratio", ratio, 1, kMaxRatio);
  p.ratio = static_cast<int>(ratio);
  p.batch_size = *batch;
  p.report = checked_report(op, report, home, cache_seqlens);
  return p;
}

struct Arguments {
  const Tensor &kv_pages, &state, &kv_score, &ape, &norm_weight, &cos_sin, &page_table, &state_indices, &cache_seqlens,
      &cu_seqlens_q, &entry_indptr;
  int64_t ratio;
  double eps;
  bool interleaved, hadamard, ue8m0;
  const OptionalTensor& report;
};

// uint8 pages by the width of their rows, or pages of values.
inline void check_pages(const char* op, const Tensor& pages, Params& p) {
  Dim num_pages("num_pages"), page_size("page_size"), row("row");
  TensorCheck(op, "kv_pages", pages)
      .dtype({DType::kFloat32, DType::kFloat16, DType::kBFloat16, DType::kUInt8})
      .shape({num_pages, page_size, row});
  TensorCheck(op, "kv_pages", pages).size_at_least(1, "page_size", 1, "a page holds an entry").dense_last().apart();
  p.row_dtype = dtype_of(pages);
  p.kind = RowKind::kValues;
  p.dim = static_cast<int>(*row);
  if (p.row_dtype == DType::kUInt8) {
    p.kind = *row == kSharedRowDataBytes + kSharedRowScaleBytes ? RowKind::kShared : RowKind::kIndex;
    p.dim = p.kind == RowKind::kShared ? kSharedRowValues : static_cast<int>(*row) - 4;
    if (p.kind == RowKind::kIndex && p.dim != 64 && p.dim != 128) {
      fail(op, "kv_pages.shape[2] must be 584 (512 values), 132 or 68 (an index key and its scale) in uint8, got " +
                   std::to_string(*row));
    }
    if (*page_size > 1 && pages.stride(1) != *row) {
      fail(op, "kv_pages.stride(1) must be " + std::to_string(*row) +
                   " (a page's rows and scales lie without gaps), got " + std::to_string(pages.stride(1)));
    }
    if (p.kind == RowKind::kIndex) {
      TensorCheck(op, "kv_pages", pages).aligned(4);
      if (pages.stride(0) % 4 != 0) {
        fail(op, "kv_pages.stride(0) must be a multiple of 4, got " + std::to_string(pages.stride(0)));
      }
    }
  } else if (p.dim < kRopeDim || p.dim > kMaxDim || p.dim % kRopeDim != 0) {
    fail(op, "kv_pages.shape[2] (values of an entry) must be a multiple of 64 up to 512, got " + std::to_string(*row));
  }
  const int64_t size = size_of(p.row_dtype);
  p.pages = static_cast<uint8_t*>(pages.mutable_data_ptr());
  p.num_pages = *num_pages;
  p.stride_page = pages.stride(0) * size;
  p.stride_row = pages.stride(1) * size;
  p.page_size = page_size.as_int();
  p.page_shift = shift_of(*page_size);
}

inline const float* checked_floats(const char* op, const char* name, const Tensor& tensor, const Tensor& home,
                                   std::initializer_list<std::reference_wrapper<Dim>> shape) {
  TensorCheck(op, name, tensor).device_as("kv_pages", home).dtype({DType::kFloat32}).shape(shape).contiguous();
  return static_cast<const float*>(tensor.const_data_ptr());
}

inline Params checked_params(const Arguments& given) {
  const char *op = "compress_kv", *home = "kv_pages";
  Params p{};
  check_pages(op, given.kv_pages, p);
  check_range(op, "ratio", given.ratio, 1, kMaxRatio);
  p.ratio = static_cast<int>(given.ratio);
  Dim tokens("num_tokens"), row("2 * width"), slots("num_slots"), state_tokens("state_tokens"), batch("batch_size");
  TensorCheck(op, "kv_score", given.kv_score)
      .device_as(home, given.kv_pages)
      .dtype({DType::kFloat32, DType::kFloat16, DType::kBFloat16})
      .shape({tokens, row})
      .dense_last();
  if (*row != 2 * p.dim && *row != 4 * p.dim) {
    fail(op, "kv_score.shape[1] must be " + std::to_string(2 * p.dim) + " (a value and a score of each channel) or " +
                 std::to_string(4 * p.dim) + " (those for the next entry before them), got " + std::to_string(*row));
  }
  p.overlap = *row == 4 * p.dim;
  TensorCheck(op, "state", given.state)
      .device_as(home, given.kv_pages)
      .dtype_as("kv_score", given.kv_score)
      .shape({slots, state_tokens, row})
      .contiguous();
  if (*state_tokens < p.reach()) {
    fail(op, "state.shape[1] (state_tokens) must be at least " + std::to_string(p.reach()) +
                 " (tokens that an entry pools), got " + std::to_string(*state_tokens));
  }
  p.kv_score = given.kv_score.const_data_ptr();
  p.num_tokens = *tokens;
  p.stride_token = given.kv_score.stride(0);
  p.dtype = dtype_of(given.kv_score);
  p.state = given.state.mutable_data_ptr();
  p.num_slots = *slots;
  p.state_tokens = *state_tokens;
  p.stride_slot = given.state.stride(0);
  Dim ratio("ratio", given.ratio, "ratio"), width("width", p.width(), "kv_score"), dim("dim", p.dim, home);
  Dim positions("max_positions"), rope("rope_dim", kRopeDim, "the op");
  p.ape = checked_floats(op, "ape", given.ape, given.kv_pages, {ratio, width});
  p.norm_weight = checked_floats(op, "norm_weight", given.norm_weight, given.kv_pages, {dim});
  p.cos_sin = checked_floats(op, "cos_sin", given.cos_sin, given.kv_pages, {positions, rope});
  p.max_positions = *positions;
  p.interleaved = given.interleaved;
  check_finite(op, "eps", given.eps);
  p.eps = static_cast<float>(given.eps);
  p.state_indices = checked_slots(op, "state_indices", given.state_indices, home, given.kv_pages, batch);
  p.batch_size = *batch;
  p.cache_seqlens = checked_slots(op, "cache_seqlens", given.cache_seqlens, home, given.kv_pages, batch);
  Dim bounds("batch_size + 1", *batch + 1, "state_indices"), max_pages("max_pages");
  p.cu_seqlens_q = checked_slots(op, "cu_seqlens_q", given.cu_seqlens_q, home, given.kv_pages, bounds);
  p.entry_indptr = checked_slots(op, "entry_indptr", given.entry_indptr, home, given.kv_pages, bounds);
  TensorCheck(op, "page_table", given.page_table)
      .device_as(home, given.kv_pages)
      .dtype({DType::kInt32})
      .shape({batch, max_pages})
      .dense_last();
  p.page_table = static_cast<const int32_t*>(given.page_table.const_data_ptr());
  p.stride_table = given.page_table.stride(0);
  p.max_pages = *max_pages;
  p.how = {given.hadamard, given.ue8m0};
  p.report = checked_report(op, given.report, home, given.kv_pages);
  return p;
}

}  // namespace attnops::compressed_kv
