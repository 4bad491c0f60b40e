#pragma once
#include <string>

#include "local_batches/params.h"
#include "torch_bindings/check.h"

namespace attnops::local_batches {

// The op's whole contract, checked once for all devices.
inline Params checked_params(const Tensor& local_cu_seqlens_q, const Tensor& local_cache_seqlens,
                             const Tensor& local_page_table, const Tensor& cu_seqlens_q, const Tensor& cache_seqlens,
                             const Tensor& page_table, int64_t page_size, int64_t chunk_size) {
  constexpr const char* kOp = "build_local_batches";
  check_range(kOp, "page_size", page_size, 1, INT32_MAX);
  check_range(kOp, "chunk_size", chunk_size, 1, INT32_MAX);
  if (chunk_size % page_size != 0) {
    fail(kOp, "chunk_size must be a multiple of page_size " + std::to_string(page_size) + ", got " +
                  std::to_string(chunk_size));
  }
  const auto check = [&](const char* name, const Tensor& tensor) {
    const TensorCheck tensor_check(kOp, name, tensor);
    tensor_check.device_as("cache_seqlens", cache_seqlens).dtype({DType::kInt32});
    return tensor_check;
  };
  Dim batch("batch_size"), pages("max_pages"), local("max_local");
  TensorCheck(kOp, "cache_seqlens", cache_seqlens).dtype({DType::kInt32}).shape({batch}).contiguous();
  Dim bounds("batch_size + 1", *batch + 1, "cache_seqlens");
  check("cu_seqlens_q", cu_seqlens_q).shape({bounds}).contiguous();
  check("page_table", page_table).shape({batch, pages}).dense_last();
  Dim cells("chunk_size / page_size", chunk_size / page_size, "chunk_size");
  check("local_cache_seqlens", local_cache_seqlens).shape({local}).contiguous();
  Dim local_bounds("max_local + 1", *local + 1, "local_cache_seqlens");
  check("local_cu_seqlens_q", local_cu_seqlens_q).shape({local_bounds}).contiguous();
  check("local_page_table", local_page_table).shape({local, cells}).contiguous();
  return {.batch_size = *batch,
          .max_pages = *pages,
          .max_local = *local,
          .local_pages = *cells,
          .page_size = page_size,
          .chunk_size = chunk_size,
          .cu_seqlens_q = static_cast<const int32_t*>(cu_seqlens_q.const_data_ptr()),
          .cache_seqlens = static_cast<const int32_t*>(cache_seqlens.const_data_ptr()),
          .page_table = static_cast<const int32_t*>(page_table.const_data_ptr()),
          .page_table_stride = page_table.stride(0),
          .local_cu_seqlens_q = static_cast<int32_t*>(local_cu_seqlens_q.mutable_data_ptr()),
          .local_cache_seqlens = static_cast<int32_t*>(local_cache_seqlens.mutable_data_ptr()),
          .local_page_table = static_cast<int32_t*>(local_page_table.mutable_data_ptr())};
}

}  // namespace attnops::local_batches
