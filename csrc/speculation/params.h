#pragma once
#include <cstdint>

#include "core/math.h"
#include "core/slots.h"

// B requests, N tokens of each in its tree: the bonus token, which is the root, and N - 1 drafts.
namespace attnops::speculation {

inline constexpr int kMaxTreeTokens = 1024;  // N: one thread of a CTA each
inline constexpr int kMaxBuffers = 160;      // layers' K and V of one launch: its arguments hold them

// A matrix of int32 or int64 whose rows are dense.
struct IndexMatrix {
  const void* data;
  int64_t stride_row, columns;
  bool wide;  // int64

  ATTNOPS_HOST_DEVICE int64_t at(int64_t row, int64_t column) const {
    const int64_t i = row * stride_row + column;
    return wide ? static_cast<const int64_t*>(data)[i] : static_cast<const int32_t*>(data)[i];
  }
};

struct BuildTreeParams {
  int batch_size, num_tokens;                           // B, N
  int64_t topk;                                         // children of a node among the candidates
  IndexMatrix parent_list;                              // [B, W]: candidate that group g of `topk` candidates hangs on
  IndexMatrix top_scores_index;                         // [B, N - 1]: candidates that are in the tree, parents first
  IndexMatrix draft_tokens;                             // [B, N - 1], or absent
  IndexArray bonus_tokens;                              // [B], or absent
  const int32_t* cache_seqlens;                         // [B], without the tree
  uint8_t* tree_mask;                                   // [B, N, ceil(N / 8)]
  int64_t* positions;                                   // [B * N]
  int64_t *retrieve_index, *next_token, *next_sibling;  // [B, N]
  int64_t* tokens;                                      // [B * N], or null
  int32_t* report;                                      // core/report.h, or null
};

struct VerifyParams {
  int batch_size, num_tokens, path_length;                           // B, N, and tokens that come out at most
  IndexMatrix candidates, retrieve_index, next_token, next_sibling;  // [B, N]
  IndexArray target_predict;                                         // [B * N]; greedy
  const float *uniform, *uniform_final;                              // [B, N], [B]; sampling
  const float *target_probs, *draft_probs;                           // [B, N, V]; the second or null
  int64_t vocabulary;                                                // V; 0 in greedy
  float threshold_single, threshold_acc;
  int32_t* predicts;          // [B * N]
  int32_t* accept_index;      // [B, path_length]
  int32_t* accept_token_num;  // [B]
  int32_t* report;
};

// One of the buffers whose rows are moved: a token's row is `heads` pieces of `head_bytes`.
struct Rows {
  char* pages;
  int64_t stride_page, stride_token, stride_head;  // bytes
  int64_t num_slots;
  int heads, head_bytes;
};

struct Buffers {
  int count, num_full;  // of the rest the slots are looked up in slot_map
  int page_size, page_shift;
  IndexArray slot_map;  // or absent
  Rows rows[kMaxBuffers];
};

struct MoveParams {
  int batch_size, num_tokens, path_length;  // B, N, columns of accept_index
  IndexMatrix accept_index;                 // [B, path_length]: row of out_cache_loc, negative: none
  IndexArray out_cache_loc;                 // [B * N]
  int32_t* req_to_token;                    // [max_requests, max_context], or null
  int64_t req_to_token_stride, max_requests, max_context;
  IndexArray req_pool_indices;   // [B], or absent
  const int32_t* cache_seqlens;  // [B], without the tree; or null
  int32_t* report;
};

// The requests of a draft loop and where the drafts of their branches stand.
struct DraftRequests {
  int batch_size;
  int64_t topk, draft_steps, page_size;
  const int32_t* req_to_token;  // [max_requests, max_context]
  int64_t req_to_token_stride, max_requests, max_context;
  IndexArray req_pool_indices;   // [B]
  const int32_t* cache_seqlens;  // [B], without drafts
  bool checked;                  // the caller asked for a report
  int32_t* report;

  ATTNOPS_HOST_DEVICE bool has_row(int b) const {
    const int64_t row = req_pool_indices[b];
    return row >= 0 && row < max_requests;
  }
  // Tokens of the prefix that are served: a length beyond the row is cut, or left out where it is reported.
  ATTNOPS_HOST_DEVICE int64_t prefix(int b) const {
    const int64_t length = cache_seqlens[b];
    if (!has_row(b) || length < 0 || (checked && last_cell(length) > max_context)) return 0;
    return min_of(length, max_context);
  }
  // Where branch k's drafts begin among the request's cells.
  ATTNOPS_HOST_DEVICE int64_t first_cell(int64_t length, int64_t k) const {
    if (page_size == 1 || topk == 1) return length + k * draft_steps;
    const int64_t tail = length % page_size, pages = ceil_div(tail + draft_steps, page_size);
    return length - tail + k * pages * page_size + tail;
  }
  // One past the last cell that a draft of the request stands at.
  ATTNOPS_HOST_DEVICE int64_t last_cell(int64_t length) const {
    return first_cell(max_of<int64_t>(length, 0), topk - 1) + draft_steps;
  }
  ATTNOPS_HOST_DEVICE const int32_t* cells(int b) const {
    return req_to_token + req_pool_indices[b] * req_to_token_stride;
  }
};

struct DraftIndicesParams {
  DraftRequests requests;
  int64_t num_steps;    // rows of the destinations
  int32_t* kv_indptr;   // [num_steps, B * topk + 1]
  int32_t* kv_indices;  // [num_steps, num_indices]
  int64_t indptr_stride, indices_stride, num_indices;
};

enum class MaskMode : int { kFullRows = 0, kTree = 1, kBits = 2 };

struct PackMaskParams {
  MaskMode mode;
  int batch_size, num_tokens;
  const uint8_t* mask;     // full rows: [num_bytes]; tree: [B, N, N]; bits: [B, N, 1, 2 or 4]
  int64_t num_bytes;       // of mask
  IndexArray mask_indptr;  // [B + 1]; full rows only
  uint8_t* tree_mask;      // [B, N, ceil(N / 8)]
  int32_t* report;         // with it, the prefix's columns are looked at, too
};

}  // namespace attnops::speculation
