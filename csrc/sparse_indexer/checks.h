#pragma once
#include "sparse_indexer/params.h"
#include "torch_bindings/check.h"
#include "torch_bindings/index_checks.h"

// The ops' whole contract, checked once for all devices. Params exist only when the arguments are right.
namespace attnops::sparse_indexer {

// Contiguous int32 [extent]; null where it is absent.
inline const int32_t* checked_per_row(const char* op, const char* name, const OptionalTensor& tensor, Dim& extent,
                                      const char* other_name, const Tensor& other) {
  if (!tensor) return nullptr;
  TensorCheck(op, name, *tensor).device_as(other_name, other).dtype({DType::kInt32}).shape({extent}).contiguous();
  return static_cast<const int32_t*>(tensor->const_data_ptr());
}

struct SelectTensors {
  const Tensor& indices;
  const OptionalTensor& positions;
  const Tensor &logits, &lengths;
  const OptionalTensor &row_starts, &page_table, &row_to_request;
  int64_t page_size;
  const OptionalTensor &offsets, &report;
};

inline SelectParams checked_select(const SelectTensors& t) {
  const char *op = "topk_select", *home = "logits";
  Dim rows("num_rows"), columns("num_columns"), k("k"), requests("num_requests"), pages("max_pages");
  TensorCheck(op, home, t.logits).dtype({DType::kFloat32, DType::kBFloat16}).shape({rows, columns}).dense_last();
  check_range(op, "num_rows of logits", *rows, 0, kMaxRows);
  const auto output = [&](const char* name, const Tensor& tensor) {
    TensorCheck(op, name, tensor).device_as(home, t.logits).dtype({DType::kInt32}).shape({rows, k}).dense_last();
    return static_cast<int32_t*>(tensor.mutable_data_ptr());
  };
  SelectParams p{};
  p.indices = output("indices", t.indices);
  check_range(op, "k, columns of indices,", *k, 0, kMaxSelected);
  if (t.positions) {
    p.positions = output("positions", *t.positions);
    p.stride_positions = t.positions->stride(0);
  }
  check_range(op, "page_size", t.page_size, 1, INT32_MAX);
  if (t.page_table) {
    if (t.offsets) fail(op, "page_table and offsets must not both be given: an index is a slot or a row");
    TensorCheck(op, "page_table", *t.page_table)
        .device_as(home, t.logits)
        .dtype({DType::kInt32})
        .shape({requests, pages})
        .dense_last();
    p.page_table = static_cast<const int32_t*>(t.page_table->const_data_ptr());
    p.stride_table = t.page_table->stride(0);
    p.num_requests = *requests;
    p.max_pages = *pages;
    if (!t.row_to_request && *requests != *rows) {
      fail(op, "page_table.shape[0] (num_requests) must be " + std::to_string(*rows) +
                   " (num_rows of logits) without row_to_request, got " + std::to_string(*requests));
    }
  } else if (t.row_to_request) {
    fail(op, "row_to_request must not be given without page_table: it names rows of it");
  }
  const auto per_row = [&](const char* name, const OptionalTensor& tensor) {
    return checked_per_row(op, name, tensor, rows, home, t.logits);
  };
  p.num_rows = *rows;
  p.k = k.as_int();
  p.logits = t.logits.const_data_ptr();
  p.stride_row = t.logits.stride(0);
  p.columns = *columns;
  p.dtype = dtype_of(t.logits);
  p.lengths = per_row("lengths", t.lengths);
  p.row_starts = per_row("row_starts", t.row_starts);
  p.row_to_request = per_row("row_to_request", t.row_to_request);
  p.offsets = per_row("offsets", t.offsets);
  p.page_size = static_cast<int>(t.page_size);
  p.page_shift = shift_of(t.page_size);
  p.stride_indices = t.indices.stride(0);
  p.report = checked_report(op, t.report, home, t.logits);
  return p;
}

}  // namespace attnops::sparse_indexer
