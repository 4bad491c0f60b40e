#pragma once
#include <cstdint>

#include "core/page_table.h"
#include "core/types.h"

struct CUstream_st;

namespace attnops::xqa_decode {

inline constexpr int kMaxHeadDim = 256;

// All that a paged GQA decode kernel, on any device, may know. Strides are in elements; dim -1 is dense.
// Query row i of a request is token i of its seqlen_q newest tokens, the last of which is token cache_seqlen - 1. A
// request of a ragged batch brings as many of them as lie in q: the last ones.
struct Params {
  int batch_size, seqlen_q, num_q_heads, num_kv_heads, head_dim;

  const void* q;  // [B, S_q, H_q, D], or ragged [T, H_q, D]; of `dtype`
  int64_t q_stride_request, q_stride_token, q_stride_head;
  const void* k_pages;  // [P, page_size, H_kv, D], of `kv_dtype`
  int64_t k_stride_page, k_stride_token, k_stride_head;
  const void* v_pages;  // as k_pages
  int64_t v_stride_page, v_stride_token, v_stride_head;
  PageTable page_table;
  int table_tokens;              // that a request's cells of a matrix have room for; see tokens_in_table
  const int32_t* cache_seqlens;  // [B], the new tokens included

  void* out;  // as q
  int64_t out_stride_request, out_stride_token, out_stride_head;
  float* lse;  // [B, S_q, H_q] or [T, H_q], contiguous, or null

  // The plan (scheduler/split_kv.h): works_per_request = num_kv_heads, rows of a work = (token, head in group).
  const int32_t* tile_scheduler_metadata;  // [num_sm_parts, 8]
  union {
    const int32_t* num_splits;  // [B + 1], cuts before request b (batch-invariant mode)
    const int32_t* table_rows;  // [B], of a ragged batch on a GPU: rows of the page table, or null: a row a request
  };
  int num_sm_parts;
  int fixed_split_tokens;  // 0: balanced; below 0: a CutRule
  float* out_partial;      // [num_partials, S_q * group, D]
  float* lse_partial;      // [num_partials, S_q * group]; natural log
  int64_t num_partials;
  int32_t* semaphores;  // [B * H_kv], zero before and after every call

  float softmax_scale;
  bool causal;
  bool ragged;               // requests have up to S_q tokens; without tree_mask
  int window_left;           // -1: off
  float logit_cap;           // 0: off
  const float* sinks;        // [H_q], or null
  const uint8_t* tree_mask;  // [B, S_q, ceil(tree_keys / 8)] bits over the last keys, little-endian, or null
  union {
    int64_t tree_mask_stride_request;
    const int32_t* cu_seqlens_q;  // [B + 1], of a ragged batch
  };
  union {
    int64_t tree_mask_stride_token;
    int64_t num_tokens;  // T, of a ragged batch
  };
  const float* k_scale;  // [1] or [H_kv], or null; on the device
  const float* v_scale;
  int k_scale_stride, v_scale_stride;  // 0: one for all heads

  DType dtype, kv_dtype;
  int32_t* report;  // core/report.h, or null

  int64_t num_semaphores;  // at least B * H_kv

  union {
    int tree_keys;       // keys that tree_mask is over, at least S_q
    int num_table_rows;  // of a ragged batch on a GPU, with table_rows
  };
};

using LaunchFunction = void(const Params& params, CUstream_st* stream);

}  // namespace attnops::xqa_decode
