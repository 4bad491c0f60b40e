#pragma once
#include <cstdint>

#include "core/math.h"

namespace attnops::local_batches {

// Local attention: a query sees the keys of its own chunk of `chunk_size` positions, up to its own. Each chunk that a
// request's new tokens touch becomes a virtual request, whose pages are a slice of the request's.
struct Params {
  int64_t batch_size, max_pages;   // of the requests
  int64_t max_local, local_pages;  // virtual requests that there is room for, and cells of each
  int64_t page_size, chunk_size;   // the second is a multiple of the first
  const int32_t* cu_seqlens_q;     // [B + 1]
  const int32_t* cache_seqlens;    // [B], the new tokens included
  const int32_t* page_table;       // [B, max_pages], dense rows
  int64_t page_table_stride;
  int32_t* local_cu_seqlens_q;   // [max_local + 1]
  int32_t* local_cache_seqlens;  // [max_local]
  int32_t* local_page_table;     // [max_local, local_pages]

  struct Request {
    int64_t num_new, seqlen, first_chunk, num_chunks;
  };

  // Any lengths: what the table cannot hold is cut off, and new tokens before the first key see nothing.
  ATTNOPS_HOST_DEVICE Request request(int64_t b) const {
    const int64_t num_new = static_cast<int64_t>(cu_seqlens_q[b + 1]) - cu_seqlens_q[b];
    const int64_t seqlen = max_of<int64_t>(min_of<int64_t>(cache_seqlens[b], max_pages * page_size), 0);
    if (num_new <= 0) return {0, seqlen, 0, 0};
    const int64_t first = max_of<int64_t>(seqlen - num_new, 0) / chunk_size;
    const int64_t last = max_of<int64_t>(seqlen - 1, 0) / chunk_size;
    return {num_new, seqlen, first, last - first + 1};
  }

  // Writes virtual request `v`, chunk `index` of request `b`; the cells are shared by `lanes` callers.
  ATTNOPS_HOST_DEVICE void write(int64_t v, int64_t b, int64_t index, int lane, int lanes) const {
    const Request r = request(b);
    const int64_t begin = (r.first_chunk + index) * chunk_size, end = min_of(begin + chunk_size, r.seqlen);
    if (lane == 0) {
      const int64_t row = index == 0 ? 0 : begin - (r.seqlen - r.num_new);
      local_cu_seqlens_q[v] = static_cast<int32_t>(cu_seqlens_q[b] + row);
      local_cache_seqlens[v] = static_cast<int32_t>(max_of<int64_t>(end - begin, 0));
    }
    const int32_t* cells = page_table + b * page_table_stride + begin / page_size;
    const int64_t count = min_of(ceil_div(max_of<int64_t>(end - begin, 0), page_size), local_pages);
    for (int64_t i = lane; i < count; i += lanes) local_page_table[v * local_pages + i] = cells[i];
  }

  // Virtual requests from `v` on that no chunk needs, and the end of the last one.
  ATTNOPS_HOST_DEVICE void write_unused(int64_t v) const {
    local_cu_seqlens_q[v] = cu_seqlens_q[batch_size];
    if (v < max_local) local_cache_seqlens[v] = 0;
  }
};

}  // namespace attnops::local_batches
