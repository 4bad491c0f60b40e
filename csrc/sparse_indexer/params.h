#pragma once
#include <cstdint>

#include "core/types.h"

// T rows (query tokens), k keys selected of each.
namespace attnops::sparse_indexer {

inline constexpr int64_t kMaxRows = 1 << 26;  // T: a grid of CTAs counts clusters of them
inline constexpr int kMaxSelected = 2048;     // k

struct SelectParams {
  int64_t num_rows;    // T
  int k;               // keys selected of a row
  const void* logits;  // [T, columns], of `dtype`: float32 or bfloat16
  int64_t stride_row, columns;
  DType dtype;
  const int32_t* lengths;     // [T]: keys of a row; below 1: padding
  const int32_t* row_starts;  // [T]: column of a row's first key; or null for 0
  // Where a position is turned into a slot: the page table, or an offset per row, or neither.
  const int32_t* page_table;  // [num_requests, max_pages], or null
  int64_t stride_table, num_requests, max_pages;
  const int32_t* row_to_request;  // [T]; or null: row t is of request t
  int page_size, page_shift;      // page_shift: log2(page_size), or -1 when it is no power of two
  const int32_t* offsets;         // [T], or null
  int32_t* indices;               // [T, k]
  int32_t* positions;             // [T, k], or null
  int64_t stride_indices, stride_positions;
  int32_t* report;  // core/report.h, or null
};

}  // namespace attnops::sparse_indexer
