#pragma once
#include <cstdint>

#include "core/page_table.h"
#include "core/report.h"
#include "core/slots.h"
#include "core/types.h"

// K and V of four bits: float4_e2m1fn_x2, two values a byte, the even one in the low half, and a float8_e4m3fn scale
// for every 16 values of a row. A value is code x scale of its block x scale of the tensor.
namespace attnops::fp4_kv {

inline constexpr int kBlock = 16;           // values that share a scale
inline constexpr float kLargestCode = 6.f;  // 0, 0.5, 1, 1.5, 2, 3, 4 and 6, with a sign
inline constexpr int kMaxHeadDim = 576;

inline constexpr ReportOp kReportStoreKvFp4{39}, kReportFp4Decode{40};  // python/attnops/report.py has both

// Pages of one side. Strides of pages are in bytes, those of scales in scales; a head's are dense.
struct Pages {
  uint8_t* codes;   // [P, page_size, H_kv, D / 2]
  uint8_t* scales;  // [P, page_size, H_kv, D / 16] of e4m3
  int64_t codes_stride_page, codes_stride_token, codes_stride_head;
  int64_t scales_stride_page, scales_stride_token, scales_stride_head;
  const float* scale;  // [1] of the tensor, or null: 1
};

struct StoreSide {
  Pages pages;
  const void* rows;  // [T, H_kv, D], of `dtype`; null: nothing to store
  int64_t stride_token, stride_head;
  int head_dim;
};

struct StoreParams {
  IndexArray slots;  // [T]; negative: not stored
  int64_t num_slots;
  int page_size, num_heads;
  StoreSide k, v;
  DType dtype;
  int32_t* report;
};

struct DecodeParams {
  int batch_size, seqlen_q, num_q_heads, num_kv_heads, head_dim, head_dim_v;

  const void* q;  // [B, S_q, H_q, D], of `dtype`
  int64_t q_stride_request, q_stride_token, q_stride_head;
  Pages k, v;  // v.codes null: V is the first head_dim_v values of K, as in MLA
  PageTable page_table;
  const int32_t* cache_seqlens;  // [B], the new tokens included

  void* out;  // [B, S_q, H_q, D_v], of `dtype`
  int64_t out_stride_request, out_stride_token, out_stride_head;
  float* lse;  // [B, S_q, H_q] contiguous, or null

  // Scratch of a GPU: results over a share of the keys each. A request's 32-key tiles are dealt out evenly.
  int num_splits;      // 0: none is given
  float* out_partial;  // [num_splits, B, S_q, H_q, D]
  float* lse_partial;  // [num_splits, B, S_q, H_q]; base 2

  float softmax_scale;
  int window_left;     // -1: off
  float logit_cap;     // 0: off
  const float* sinks;  // [H_q], or null
  DType dtype;
  int32_t* report;
};

}  // namespace attnops::fp4_kv
