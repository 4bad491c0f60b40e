#pragma once
#include <cstdint>

#include "core/math.h"
#include "core/types.h"

namespace attnops {

// The pages of every request, in either of the two forms that engines keep, read without a copy:
// a matrix [B, max_pages], or CSR, where request b owns cells [kv_indptr[b], kv_indptr[b + 1]) of one flat array.
// Cells beyond a request's length are never read. Whatever kv_indptr holds, no cell outside the array is a request's.
struct PageTable {
  const int32_t* cells;      // [B, max_pages] or [num_indices]
  const int32_t* kv_indptr;  // [B + 1], or null for the matrix form
  int64_t stride_request;    // of the matrix form
  int64_t num_pages;         // in the pool: what a cell must stay below
  int page_size;
  int64_t max_pages = 0;    // cells of a request in the matrix form
  int64_t num_indices = 0;  // of all requests in CSR

  ATTNOPS_HOST_DEVICE bool has_page(int page) const { return page >= 0 && page < num_pages; }

  ATTNOPS_HOST_DEVICE const int32_t* row(int request) const {
    return cells + (kv_indptr ? first_index(request) : request * stride_request);
  }

  ATTNOPS_HOST_DEVICE int64_t num_cells(int request) const {
    if (!kv_indptr) return max_pages;
    if (kv_indptr[request] < 0) return 0;
    const int64_t end = min_of(int64_t{kv_indptr[request + 1]}, num_indices);
    return max_of(end - first_index(request), int64_t{0});
  }

  // Tokens that the request's cells have room for: none where the pool has no page. At most kMostTokens.
  ATTNOPS_HOST_DEVICE int num_tokens(int request) const {
    const int64_t tokens = num_cells(request) * page_size;
    return num_pages == 0 ? 0 : static_cast<int>(min_of(tokens, int64_t{kMostTokens}));
  }

  static constexpr int kMostTokens = 1 << 30;

 private:
  ATTNOPS_HOST_DEVICE int64_t first_index(int request) const {
    return min_of(max_of(int64_t{kv_indptr[request]}, int64_t{0}), num_indices);
  }
};

}  // namespace attnops
