#pragma once
#include <cstdint>

#include "core/index_key.h"
#include "core/index_report.h"
#include "core/slots.h"
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
  // With row_starts alone: `lengths` are the columns behind a row's last key, and the page table has a cell for the
  // keys in front of its first one, too.
  bool lengths_are_ends = false;
  // Where a position is turned into a slot: the page table, or an offset per row, or neither.
  const int32_t* page_table;  // [num_requests, max_pages], or null
  int64_t stride_table, num_requests, max_pages;
  const int32_t* row_to_request;  // [T]; or null: row t is of request t / rows_per_request
  int64_t rows_per_request = 1;
  int page_size, page_shift;  // page_shift: log2(page_size), or -1 when it is no power of two
  const int32_t* offsets;     // [T], or null
  int32_t* indices;           // [T, k]
  int32_t* positions;         // [T, k], or null
  int64_t stride_indices, stride_positions;
  int32_t* report;  // core/report.h, or null
  ReportOp report_op = kReportTopkSelect;
  int64_t first_row = 0;  // among those of the call, for reports
};

// Pages of index keys: page_size e4m3 keys of `dim` bytes, then a float32 scale of each.
struct IndexPages {
  uint8_t* data;
  int64_t stride_page, num_pages;  // bytes
  int dim, page_size, page_shift;

  ATTNOPS_HOST_DEVICE uint8_t* key(int64_t page, int offset) const {
    return data + page * stride_page + int64_t{offset} * dim;
  }
  ATTNOPS_HOST_DEVICE float* scale(int64_t page, int offset) const {
    return reinterpret_cast<float*>(data + page * stride_page + int64_t{page_size} * dim) + offset;
  }
};

// How a row becomes e4m3.
struct StoreIndexParams {
  IndexPages pages;
  Quantization how;
  const void* k;  // [T, dim], of `dtype`
  int64_t num_tokens, stride_token;
  DType dtype;
  IndexArray out_cache_loc;  // [T]
  int32_t* report;
};

struct QuantizeQueryParams {
  Quantization how;
  const void* q;  // [T, H, dim], of `dtype`
  int64_t num_tokens, stride_token, stride_head;
  int num_heads, dim;
  DType dtype, weights_dtype;
  const void* weights;  // [T, H]
  int64_t stride_weights;
  float scale;
  uint8_t* q_fp8;  // [T, H, dim]
  int64_t stride_out_token, stride_out_head;
  float* weights_out;  // [T, H]
  int64_t stride_weights_out;
};

struct GatherIndexParams {
  IndexPages pages;
  const int32_t* page_table;  // [B, max_pages]
  int64_t stride_table, batch_size, max_pages;
  const int32_t* cu_seqlens;  // [B + 1]
  uint8_t* k;                 // [num_keys, dim]
  int64_t num_keys, stride_k;
  float* k_scale;  // [num_keys]
  int32_t* report;
};

inline constexpr int kMaxIndexHeads = 64;

// Logits of index keys: k_scale * sum over heads of weight * max(q . k, 0).
struct LogitsParams {
  void* logits;  // [T, columns], float32 or bfloat16
  int64_t stride_row, columns;
  bool bf16;
  const uint8_t* q;  // [T, H, dim] e4m3
  int64_t num_rows, stride_token, stride_head;
  int num_heads, dim;
  const float* weights;  // [T, H]
  int64_t stride_weights;
  bool ragged;  // keys in rows; else in pages, and T is B * seqlen_q
  IndexPages pages;
  const int32_t* page_table;  // [B, max_pages]
  int64_t stride_table, max_pages;
  const int32_t* cache_seqlens;  // [B, seqlen_q]: keys that each token sees
  int seqlen_q;
  const uint8_t* k;  // [num_keys, dim] e4m3
  int64_t num_keys, stride_k;
  const float* k_scale;                  // [num_keys]
  const int32_t *row_starts, *row_ends;  // [T]: keys that a row sees; in pages of the CPU alone the first one, or null
  bool compressed;                       // a row's first column is its first key; else column j is key j
  int32_t* report;
  ReportOp report_op = kReportIndexLogitsPaged;  // of keys in pages
  int64_t first_row = 0, first_request = 0;      // among those of the call, for reports
};

// The k largest logits of each row, of which the scratch has some rows at a time.
struct IndexTopkParams {
  LogitsParams logits;  // into the scratch
  SelectParams select;  // out of it
  int64_t rows_at_once;
  int64_t piece_keys = 0;  // keys come in pieces of so many (topk_pieces.h); 0: rows are whole
  float* scratch = nullptr;
};

// Requests to token rows.
struct ExpandParams {
  int64_t num_rows, batch_size;
  int ratio, topk;
  const int32_t *cache_seqlens, *cu_seqlens_q;  // [B], [B + 1]
  int32_t *seqlens, *rows, *topk_length;        // [num_rows]
  int32_t* report;
};

}  // namespace attnops::sparse_indexer
