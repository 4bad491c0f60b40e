#pragma once
#include <cstdint>

#include "core/slots.h"
#include "core/types.h"

namespace attnops::paged_kv {

inline constexpr int kLatentDim = 512;    // of an MLA row
inline constexpr int kRopeDim = 64;       // of an MLA row
inline constexpr int kMlaDim = 576;       // both
inline constexpr int kGroupDim = 128;     // latent elements that share a scale in the 656-byte row
inline constexpr int kFp8RowBytes = 656;  // 512 e4m3, 4 float32 scales, 64 bf16

// Strides are in elements everywhere below.

// The requests of a batch and where each of their tokens is: what both forms of a page table are made from.
struct Requests {
  int batch_size;
  const int32_t* req_to_token;  // [max_requests, max_context]: token slot of every position
  int64_t req_to_token_stride;  // of its dim 0; dim 1 is dense
  int64_t max_requests;
  int max_tokens;                // longest length that is served
  IndexArray req_pool_indices;   // [B]: the request's row of req_to_token
  const int32_t* cache_seqlens;  // [B]
  const int32_t* first_tokens;   // [B]: position of a request's first token in its row, or null: 0
  int page_size, page_shift;     // page_shift: log2(page_size), or -1 when it is no power of two
  IndexArray slot_map;           // [num_slots]: slot of the full pool -> slot of the sliding-window pool; or absent
  bool checked;                  // the caller asked for a report: a request with a fault is left out, not cut
  int32_t* report;               // core/report.h, or null
};

struct PageTableParams {
  Requests requests;
  int32_t* page_table;  // [B, max_pages]
  int64_t page_table_stride;
  int max_pages;
};

struct KvIndicesParams {
  Requests requests;
  int32_t* kv_indptr;         // [B + 1]
  int32_t* kv_indices;        // [num_indices]
  int32_t* kv_last_page_len;  // [B], or null
  int64_t num_indices;
};

struct CuSeqlensParams {
  int batch_size;
  int32_t* cu_seqlens;     // [B + 1]
  const int32_t* seqlens;  // [B]
};

struct TranslateParams {
  int64_t num_slots;
  void* out;  // [num_slots], int32 or int64
  int64_t out_stride;
  bool out_wide;
  IndexArray slots;     // [num_slots]
  IndexArray slot_map;  // any length
  int32_t* report;
};

// One of K and V: new rows on one side, the pool on the other.
struct KvStore {
  void* pages;  // [P, page_size, H, D], of `page_dtype`
  int64_t stride_page, stride_page_token, stride_page_head;
  const void* rows;  // [T, H, D], of `dtype`
  int64_t stride_token, stride_head;
  int head_dim;
  const float* scale;  // [1] or [H] on the device, or null for 1
  int scale_stride;    // 0: one for all heads
};

// Where the rows go.
struct StoreTarget {
  int64_t num_tokens;
  IndexArray out_cache_loc;  // [T]
  int page_size, page_shift;
  int64_t num_slots;  // of the pool
  int32_t* report;
};

struct StoreKvParams {
  StoreTarget target;
  KvStore k, v;
  int num_heads;
  DType dtype, page_dtype;  // equal: copy; FP8 pages and wider rows: quantize
};

struct StoreMlaParams {
  StoreTarget target;
  void* kv_pages;  // [P, page_size, 576] of page_dtype, or uint8 [P, page_size, 656]
  int64_t stride_page, stride_page_token;
  const void* latent;  // [T, 512], the first columns of a wider row or not
  int64_t latent_stride;
  const void* k_pe;  // [T, 64]
  int64_t k_pe_stride;
  const float* kv_scale;    // [1] on the device, or null for 1
  DType dtype, page_dtype;  // equal: copy; FP8: one scale; uint8: the 656-byte row
};

}  // namespace attnops::paged_kv
