#pragma once
#include <cstdint>

#include "core/types.h"

namespace attnops {

// The pages of every request, in either of the two forms that engines keep, read without a copy:
// a matrix [B, max_pages], or CSR, where request b owns cells [kv_indptr[b], kv_indptr[b + 1]) of one flat array.
// Cells beyond a request's length are never read.
struct PageTable {
  const int32_t* cells;      // [B, max_pages] or [num_indices]
  const int32_t* kv_indptr;  // [B + 1], or null for the matrix form
  int64_t stride_request;    // of the matrix form
  int64_t num_pages;         // in the pool: what a cell must stay below
  int page_size;
  int64_t max_pages = 0;  // cells of a request in the matrix form; only the checked mode asks

  ATTNOPS_HOST_DEVICE const int32_t* row(int request) const {
    return cells + (kv_indptr ? static_cast<int64_t>(kv_indptr[request]) : request * stride_request);
  }

  ATTNOPS_HOST_DEVICE int64_t num_cells(int request) const {
    return kv_indptr ? static_cast<int64_t>(kv_indptr[request + 1]) - kv_indptr[request] : max_pages;
  }
};

}  // namespace attnops
