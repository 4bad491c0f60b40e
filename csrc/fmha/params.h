#pragma once
#include <cstdint>

#include "core/page_table.h"
#include "core/types.h"

namespace attnops::fmha {

// All that a ragged attention kernel, on any device, may know. Strides are in elements; dim -1 is dense.
// Request b owns query tokens [cu_seqlens_q[b], cu_seqlens_q[b + 1]). Its last query is aligned with its last key.
struct Params {
  int batch_size, num_q_heads, num_kv_heads, head_dim_qk, head_dim_v;
  int64_t num_q_tokens;  // rows of q and out; those behind the last request get zeros and -inf
  int64_t num_k_tokens;  // rows of k and v, ragged only

  const void* q;  // [T, H_q, D_qk], of `dtype`; e4m3 with e4m3 keys alone
  int64_t q_stride_token, q_stride_head;

  // Ragged keys (fmha_varlen): [T_k, H_kv, D], stride_page 0, request b at cu_seqlens_k[b].
  // Paged keys (fmha_paged): [P, page_size, H_kv, D], through page_table, cache_seqlens[b] of them.
  const void* k;
  int64_t k_stride_page, k_stride_token, k_stride_head;
  const void* v;
  int64_t v_stride_page, v_stride_token, v_stride_head;
  bool paged;
  PageTable page_table;          // paged only
  const int32_t* cu_seqlens_q;   // [B + 1]
  const int32_t* cu_seqlens_k;   // [B + 1], ragged only
  const int32_t* cache_seqlens;  // [B], paged only; the new tokens included

  const int32_t* tile_order;  // [num_tiles, 2]: request, query tile of it; (-1, -1): none (scheduler/varlen_tiles.h)
  int num_tiles, tile_q;
  const int32_t* pieces;  // [1 + max_pieces, 4] of tiles whose keys are cut (scheduler/varlen_cuts.h), or null
  int max_pieces;
  float* partial;  // [partial_size]: results of pieces, then their lse; as a kernel lays them out
  int64_t partial_size;

  void* out;  // [T, H_q, D_v], of `dtype`; bfloat16 with e4m3 queries
  int64_t out_stride_token, out_stride_head;
  float* lse;  // [T, H_q] contiguous, or null

  float softmax_scale;
  bool causal;
  int window_left, window_right;  // -1: off
  float logit_cap;                // 0: off
  const float* sinks;             // [H_q], or null
  const uint8_t* tree_mask;       // [T, mask_bytes] bits over the queries of the request, or null
  int64_t tree_mask_stride_token;
  int64_t tree_mask_bytes;
  const float* k_scale;  // [1] or [H_kv], or null; on the device
  const float* v_scale;
  int k_scale_stride, v_scale_stride;  // 0: one for all heads

  DType dtype, kv_dtype;
  int32_t* semaphores;  // [3], zeros between calls: works taken, CTAs that have left, parts of pieces done; or null
  int32_t* report;      // core/report.h, or null

  const int32_t* hidden_keys;  // [T, 2]: keys [begin, end) of its request that a query does not see, or null
};

}  // namespace attnops::fmha
