#pragma once
#include <cstdint>

#include "core/page_table.h"
#include "core/types.h"
#include "mla_decode/plan.h"
#include "mla_decode/selected.h"

namespace attnops::mla_decode {

inline constexpr int kHeadDimQk = 576;    // latent and rope
inline constexpr int kHeadDimV = 512;     // latent: V is the first 512 of K
inline constexpr int kHeadDimRope = 64;   // the rest
inline constexpr int kFp8RowBytes = 656;  // 512 e4m3, 4 float32 scales (one per 128), 64 bf16 rope

// Rows whose value is all of the key: 448 of the latent and 64 of rope.
inline constexpr int kHeadDimShared = 512, kSharedNope = kHeadDimShared - kHeadDimRope;
// The same as bytes. A page of n tokens: n times 448 e4m3 and 64 bf16, then n times 7 ue8m0 scales (one per 64) and a
// pad.
inline constexpr int kSharedDataBytes = 576, kSharedScaleBytes = 8, kSharedScaleWidth = 64;
inline constexpr int kSharedRowBytes = kSharedDataBytes + kSharedScaleBytes;

// All that an MLA decode kernel, on any device, may know. Strides are in elements; dim -1 is dense.
// Query row i of a request is token i of its seqlen_q newest tokens, the last of which is token cache_seqlen - 1.
struct Params {
  int batch_size, seqlen_q, num_q_heads;

  const void* q;  // [B, S_q, H_q, 576], or the latent 512 of it when q_pe is given; of `dtype`
  int64_t q_stride_request, q_stride_token, q_stride_head;
  const void* q_pe;  // [B, S_q, H_q, 64], or null
  int64_t q_pe_stride_request, q_pe_stride_token, q_pe_stride_head;

  // [P, page_size, 576] of `dtype` or e4m3 with one scale, or uint8 [P, page_size, 656]: `kv_dtype` tells which.
  const void* kv_pages;
  int64_t kv_stride_page, kv_stride_token;
  PageTable page_table;
  const int32_t* cache_seqlens;  // [B], the new tokens included

  void* out;  // [B, S_q, H_q, 512], of `dtype`
  int64_t out_stride_request, out_stride_token, out_stride_head;
  float* lse;  // [B, S_q, H_q] contiguous, or null

  // The plan (plan.h): a work is `division.blocks` blocks of kPlanRows rows (token, head), rows numbered token-major.
  const int32_t* tile_scheduler_metadata;  // [num_sm_parts, 8]
  const int32_t* num_splits;               // [B + 1], cuts before request b (batch-invariant mode)
  int num_sm_parts;
  WorkDivision division;
  int fixed_split_tokens;  // 0: balanced
  float* out_partial;      // [num_partials, kPlanRows, 512]
  float* lse_partial;      // [num_partials, kPlanRows]; natural log
  int64_t num_partials;
  int32_t* semaphores;  // [B * blocks_per_request], zero before and after every call

  float softmax_scale;
  bool causal;
  int window_left;           // -1: off
  float logit_cap;           // 0: off
  const float* sinks;        // [H_q], or null
  const uint8_t* tree_mask;  // [B, S_q, ceil(tree_keys / 8)] bits over the last keys, little-endian, or null
  int64_t tree_mask_stride_request, tree_mask_stride_token;
  const float* kv_scale;  // [1] on the device, or null

  DType dtype, kv_dtype;
  bool fp8_products;  // kernels may round q and probabilities to e4m3; kv_pages are e4m3 then
  int32_t* report;    // core/report.h, or null

  // Lists of rows instead of pages (selected.h): kv_pages, page_table and cache_seqlens are then of no meaning,
  // seqlen_q is 1, and there is neither causality nor window. Without tile_scheduler_metadata each work is one piece.
  bool selects;
  bool shared_rows;  // rows of 512 or 584 bytes; q has no rope apart
  SelectedRows selected, extra;
  float* max_logits;   // [requests, H_q], of unsplit works, or null
  ReportOp report_op;  // who selects

  int tree_keys;  // keys that tree_mask is over, at least S_q

  // Above 0: lists whose works are blocks of kShortRows heads, and CTA u has piece u % list_cuts of work u / list_cuts,
  // whose partial result is number u. There is no plan then.
  int list_cuts;
};

// Which keys of a list groups of heads see, in the place of a tree's mask, which lists do not have: bit i of an entry
// is for heads [i, i + 1) * of_group.
struct HeadMasks {
  const uint8_t* bits;  // [requests, count]; null: all see all
  int64_t stride;
  int of_group;

  ATTNOPS_HOST_DEVICE explicit HeadMasks(const Params& p)
      : bits(p.tree_mask), stride(p.tree_mask_stride_request), of_group(p.tree_keys) {}
};

// Of lists without a plan: whether this launch attends to them or another one, as the device has decided by then. In
// the place of what plans have.
struct ListTurn {
  const int32_t* whose;  // null: this one does
  int own;

  ATTNOPS_HOST_DEVICE explicit ListTurn(const Params& p) : whose(p.semaphores), own(static_cast<int>(p.num_partials)) {}
  ATTNOPS_HOST_DEVICE bool is_own() const { return whose == nullptr || *whose == own; }
};

}  // namespace attnops::mla_decode
