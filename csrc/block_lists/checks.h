#pragma once
#include <numeric>
#include <string>

#include "block_lists/label_scores.h"
#include "block_lists/params.h"
#include "torch_bindings/check.h"
#include "torch_bindings/index_checks.h"

namespace attnops::block_lists {

inline constexpr int64_t kMostBlockSize = 1 << 20;

// The arguments of build_block_tables, by name.
struct Arguments {
  const Tensor& block_tables;
  const Tensor& block_seqlens;
  const Tensor& block_list;
  const Tensor& page_table;
  const OptionalTensor& kv_indptr;
  const Tensor& cache_seqlens;
  const OptionalTensor& cu_seqlens_q;
  int64_t page_size, num_pages, block_size, page_step, unit_step, head_step;
  bool causal;
  const OptionalTensor& report;
  int64_t window_left;
};

// The op's whole contract, checked once for all devices.
class Checker {
 public:
  explicit Checker(const Arguments& arguments) : a_(arguments) {}

  Params run() {
    check_range(kOp, "page_size", a_.page_size, 1, PageTable::kMostTokens);
    check_range(kOp, "num_pages", a_.num_pages, 0, INT32_MAX);
    check_range(kOp, "block_size", a_.block_size, 1, kMostBlockSize);
    check_range(kOp, "window_left", a_.window_left, -1, INT32_MAX);
    if (a_.window_left >= 0 && a_.cu_seqlens_q) {
      fail(kOp, "window_left must be -1 with cu_seqlens_q, got " + std::to_string(a_.window_left));
    }
    check_requests();
    check_tables();
    check_cells();
    return params();
  }

 private:
  static constexpr const char* kOp = "build_block_tables";

  TensorCheck check(const char* name, const Tensor& tensor) const {
    const TensorCheck tensor_check(kOp, name, tensor);
    tensor_check.device_as("cache_seqlens", a_.cache_seqlens).dtype({DType::kInt32});
    return tensor_check;
  }

  // A window may begin with any token.
  int64_t unit_size() const { return a_.window_left < 0 ? std::gcd(a_.block_size, a_.page_size) : 1; }

  void check_requests() {
    TensorCheck(kOp, "cache_seqlens", a_.cache_seqlens).dtype({DType::kInt32}).shape({requests_}).contiguous();
    check("block_list", a_.block_list).shape({requests_, heads_, entries_}).dense_last();
    if (a_.kv_indptr) {
      Dim num_indices("num_indices"), bounds("batch_size + 1", *requests_ + 1, "cache_seqlens");
      check("page_table", a_.page_table).shape({num_indices}).contiguous();
      check("kv_indptr", *a_.kv_indptr).shape({bounds}).contiguous();
    } else {
      Dim max_pages("max_pages");
      check("page_table", a_.page_table).shape({requests_, max_pages}).dense_last();
    }
    if (a_.cu_seqlens_q) {
      Dim bounds("batch_size + 1", *requests_ + 1, "cache_seqlens");
      check("cu_seqlens_q", *a_.cu_seqlens_q).shape({bounds}).contiguous();
    }
  }

  void check_tables() {
    check("block_tables", a_.block_tables).shape({rows_, heads_, cells_}).dense_last().apart();
    check("block_seqlens", a_.block_seqlens).shape({rows_, heads_}).apart();
    const bool by_token = !a_.cu_seqlens_q;
    if (*requests_ == 0 ? *rows_ != 0 : by_token ? *rows_ % *requests_ != 0 : *rows_ != *requests_) {
      fail(kOp, std::string("block_tables.shape[0] must be ") + (by_token ? "a multiple of " : "") +
                    std::to_string(*requests_) + " (batch_size) as in cache_seqlens, got " + std::to_string(*rows_));
    }
    check_range(kOp, "rows of block_tables", *rows_ * *heads_, 0, INT32_MAX);
    const int64_t needed = *entries_ * (a_.block_size / unit_size());
    if (by_token && *cells_ < needed) {
      TensorCheck(kOp, "block_tables", a_.block_tables)
          .size_at_least(2, "num_cells", needed,
                         a_.window_left < 0 ? "block_list.shape[2] * block_size / gcd(block_size, page_size)"
                                            : "block_list.shape[2] * block_size, with window_left");
    }
    if (*cells_ > PageTable::kMostTokens / unit_size()) {
      fail(kOp, "block_tables.shape[2] (num_cells) must be at most " +
                    std::to_string(PageTable::kMostTokens / unit_size()) + ", got " + std::to_string(*cells_));
    }
  }

  // Every cell is an int32.
  void check_cells() const {
    check_range(kOp, "page_step", a_.page_step, 0, INT32_MAX);
    check_range(kOp, "unit_step", a_.unit_step, 0, INT32_MAX);
    check_range(kOp, "head_step", a_.head_step, 0, INT32_MAX);
    const auto last = [](int64_t extent, int64_t step) { return extent > 0 ? (extent - 1) * step : 0; };
    const int64_t most =
        last(a_.num_pages, a_.page_step) + last(a_.page_size / unit_size(), a_.unit_step) + last(*heads_, a_.head_step);
    if (most <= INT32_MAX) return;
    fail(kOp,
         "page_step, unit_step and head_step must make cells of int32, the last one would be " + std::to_string(most));
  }

  Params params() const {
    const bool csr = a_.kv_indptr.has_value();
    const auto data = [](const Tensor& t) { return static_cast<const int32_t*>(t.const_data_ptr()); };
    return {.num_rows = *rows_,
            .num_requests = requests_.as_int(),
            .num_kv_heads = heads_.as_int(),
            .block_list = data(a_.block_list),
            .list_stride_request = a_.block_list.stride(0),
            .list_stride_head = a_.block_list.stride(1),
            .num_blocks = *entries_,
            .page_table = {.cells = data(a_.page_table),
                           .kv_indptr = data_or_null<const int32_t>(a_.kv_indptr),
                           .stride_request = csr ? 0 : a_.page_table.stride(0),
                           .num_pages = a_.num_pages,
                           .page_size = static_cast<int>(a_.page_size),
                           .max_pages = csr ? 0 : a_.page_table.size(1),
                           .num_indices = csr ? a_.page_table.size(0) : 0},
            .cache_seqlens = data(a_.cache_seqlens),
            .cu_seqlens_q = data_or_null<const int32_t>(a_.cu_seqlens_q),
            .rows_per_request = *requests_ == 0 ? 1 : *rows_ / *requests_,
            .causal = a_.causal,
            .window_left = a_.window_left,
            .block_size = a_.block_size,
            .unit_size = unit_size(),
            .units_per_block = a_.block_size / unit_size(),
            .units_per_page = a_.page_size / unit_size(),
            .page_step = a_.page_step,
            .unit_step = a_.unit_step,
            .head_step = a_.head_step,
            .tables = static_cast<int32_t*>(a_.block_tables.mutable_data_ptr()),
            .table_stride_row = a_.block_tables.stride(0),
            .table_stride_head = a_.block_tables.stride(1),
            .num_cells = *cells_,
            .seqlens = static_cast<int32_t*>(a_.block_seqlens.mutable_data_ptr()),
            .seqlens_stride_row = a_.block_seqlens.stride(0),
            .seqlens_stride_head = a_.block_seqlens.stride(1),
            .report = checked_report(kOp, a_.report, "cache_seqlens", a_.cache_seqlens)};
  }

  const Arguments& a_;
  Dim requests_{"batch_size"}, heads_{"num_kv_heads"}, entries_{"num_blocks"}, rows_{"num_rows"}, cells_{"num_cells"};
};

// The contract of label_scores, checked once for all devices.
inline ScoreParams checked_scores(const Tensor& scores, const Tensor& q_labels, const Tensor& label_pages,
                                  const Tensor& page_table, const Tensor& cache_seqlens, const OptionalTensor& report) {
  constexpr const char* kOp = "label_scores";
  const auto check = [&](const char* name, const Tensor& tensor) {
    const TensorCheck tensor_check(kOp, name, tensor);
    tensor_check.device_as("q_labels", q_labels);
    return tensor_check;
  };
  Dim requests("batch_size"), q_heads("num_q_heads"), kv_heads("num_kv_heads"), channels("num_channels");
  Dim pages("num_pages"), page_size("page_size"), cells("max_pages"), columns("num_columns");
  TensorCheck(kOp, "q_labels", q_labels)
      .dtype({DType::kFloat32, DType::kFloat16, DType::kBFloat16})
      .shape({requests, q_heads, channels})
      .dense_last();
  check_range(kOp, "q_labels.shape[2] (num_channels)", *channels, 1, 1024);
  check("label_pages", label_pages)
      .dtype_as("q_labels", q_labels)
      .shape({pages, page_size, kv_heads, channels})
      .size_at_least(1, "page_size", 1, "a page holds a token")
      .size_at_least(2, "num_kv_heads", 1, "attention has a head")
      .dense_last();
  check_range(kOp, "label_pages.shape[1] (page_size)", *page_size, 1, PageTable::kMostTokens);
  if (*q_heads == 0 || *q_heads % *kv_heads != 0) {
    fail(kOp, "q_labels.shape[1] (num_q_heads) must be a positive multiple of " + std::to_string(*kv_heads) +
                  " as in label_pages.shape[2] (num_kv_heads), got " + std::to_string(*q_heads));
  }
  check("page_table", page_table).dtype({DType::kInt32}).shape({requests, cells}).dense_last();
  check("cache_seqlens", cache_seqlens).dtype({DType::kInt32}).shape({requests}).contiguous();
  check("scores", scores).dtype({DType::kFloat32}).shape({requests, kv_heads, columns}).dense_last().apart();
  check_range(kOp, "scores.shape[2] (num_columns)", *columns, 0, PageTable::kMostTokens);
  return {.num_requests = requests.as_int(),
          .num_q_heads = q_heads.as_int(),
          .num_kv_heads = kv_heads.as_int(),
          .num_channels = channels.as_int(),
          .q = q_labels.const_data_ptr(),
          .q_stride_request = q_labels.stride(0),
          .q_stride_head = q_labels.stride(1),
          .labels = label_pages.const_data_ptr(),
          .label_stride_page = label_pages.stride(0),
          .label_stride_token = label_pages.stride(1),
          .label_stride_head = label_pages.stride(2),
          .page_table = {.cells = static_cast<const int32_t*>(page_table.const_data_ptr()),
                         .kv_indptr = nullptr,
                         .stride_request = page_table.stride(0),
                         .num_pages = *pages,
                         .page_size = page_size.as_int(),
                         .max_pages = *cells},
          .cache_seqlens = static_cast<const int32_t*>(cache_seqlens.const_data_ptr()),
          .scores = static_cast<float*>(scores.mutable_data_ptr()),
          .score_stride_request = scores.stride(0),
          .score_stride_head = scores.stride(1),
          .columns = *columns,
          .dtype = dtype_of(q_labels),
          .report = checked_report(kOp, report, "q_labels", q_labels)};
}

}  // namespace attnops::block_lists
