#pragma once
#include <string>

#include "fp4_kv/params.h"
#include "torch_bindings/check.h"
#include "torch_bindings/index_checks.h"

// The ops' whole contract, checked once for all devices. Params exist only when the arguments are right.
namespace attnops::fp4_kv {

// Codes and scales of one side, whose last extents follow from `head_dim`.
inline Pages checked_pages(const char* op, const std::string& side, const Tensor& codes, const Tensor& scales,
                           const OptionalTensor& scale, Dim& num_pages, Dim& page_size, Dim& num_heads,
                           int64_t head_dim) {
  const std::string codes_name = side + "_pages", scales_name = side + "_block_scales", scale_name = side + "_scale";
  if (head_dim % kBlock != 0 || head_dim < kBlock || head_dim > kMaxHeadDim) {
    fail(op, codes_name + " must have a head_dim that is a multiple of 16 (values of a scale) up to " +
                 std::to_string(kMaxHeadDim) + ", got " + std::to_string(head_dim));
  }
  Dim bytes("head_dim / 2", head_dim / 2, "two values a byte"), blocks("head_dim / 16", head_dim / kBlock, "a scale");
  TensorCheck(op, codes_name.c_str(), codes)
      .device_as("k_pages", codes)
      .dtype({DType::kUInt8})
      .shape({num_pages, page_size, num_heads, bytes})
      .size_at_least(1, "page_size", 1, "a page holds a token")
      .dense_last();
  TensorCheck(op, scales_name.c_str(), scales)
      .device_as(codes_name.c_str(), codes)
      .dtype({DType::kFloat8E4M3})
      .shape({num_pages, page_size, num_heads, blocks})
      .dense_last();
  if (scale) {
    Dim one("num_scales", 1, "a tensor's scale");
    TensorCheck(op, scale_name.c_str(), *scale)
        .device_as(codes_name.c_str(), codes)
        .dtype({DType::kFloat32})
        .shape({one});
  }
  return {.codes = static_cast<uint8_t*>(const_cast<void*>(codes.const_data_ptr())),
          .scales = static_cast<uint8_t*>(const_cast<void*>(scales.const_data_ptr())),
          .codes_stride_page = codes.stride(0),
          .codes_stride_token = codes.stride(1),
          .codes_stride_head = codes.stride(2),
          .scales_stride_page = scales.stride(0),
          .scales_stride_token = scales.stride(1),
          .scales_stride_head = scales.stride(2),
          .scale = data_or_null<const float>(scale)};
}

// V and what belongs to it come together, or not at all.
inline bool checked_v(const char* op, const OptionalTensor& v_pages, const OptionalTensor& v_block_scales) {
  if (v_pages.has_value() != v_block_scales.has_value()) {
    fail(op, std::string(v_pages ? "v_block_scales" : "v_pages") + " must be given with " +
                 (v_pages ? "v_pages" : "v_block_scales") + ", got None");
  }
  return v_pages.has_value();
}

inline StoreParams checked_store(const Tensor& k_pages, const OptionalTensor& v_pages, const Tensor& k_block_scales,
                                 const OptionalTensor& v_block_scales, const Tensor& k, const OptionalTensor& v,
                                 const Tensor& out_cache_loc, const OptionalTensor& k_scale,
                                 const OptionalTensor& v_scale, const OptionalTensor& report) {
  const char* op = "store_kv_fp4";
  Dim num_tokens("num_tokens"), num_heads("num_kv_heads"), num_pages("num_pages"), page_size("page_size");
  Dim dim_k("head_dim"), dim_v("head_dim_v");
  const auto rows = [&](const char* name, const Tensor& tensor, Dim& dim) {
    TensorCheck(op, name, tensor)
        .device_as("k_pages", k_pages)
        .dtype({DType::kFloat32, DType::kFloat16, DType::kBFloat16})
        .dtype_as("k", k)
        .shape({num_tokens, num_heads, dim})
        .dense_last();
  };
  rows("k", k, dim_k);
  TensorCheck(op, "k_pages", k_pages).apart();
  TensorCheck(op, "k_block_scales", k_block_scales).apart();
  const bool has_v = checked_v(op, v_pages, v_block_scales);
  if (has_v != v.has_value()) fail(op, "v must be given with v_pages and only with them, as None without");
  const Pages pages_k =
      checked_pages(op, "k", k_pages, k_block_scales, k_scale, num_pages, page_size, num_heads, *dim_k);
  StoreSide v_side{};
  if (has_v) {
    rows("v", *v, dim_v);
    TensorCheck(op, "v_pages", *v_pages).device_as("k_pages", k_pages).apart();
    TensorCheck(op, "v_block_scales", *v_block_scales).apart();
    v_side.pages = checked_pages(op, "v", *v_pages, *v_block_scales, v_scale, num_pages, page_size, num_heads, *dim_v);
    v_side.rows = v->const_data_ptr(), v_side.head_dim = dim_v.as_int();
    v_side.stride_token = v->stride(0), v_side.stride_head = v->stride(1);
  }
  const IndexArray slots = checked_indices(op, "out_cache_loc", out_cache_loc, num_tokens, "k_pages", k_pages);
  return {.slots = slots,
          .num_slots = *num_pages * *page_size,
          .page_size = page_size.as_int(),
          .num_heads = num_heads.as_int(),
          .k = {pages_k, k.const_data_ptr(), k.stride(0), k.stride(1), dim_k.as_int()},
          .v = v_side,
          .dtype = dtype_of(k),
          .report = checked_report(op, report, "k_pages", k_pages)};
}

struct DecodeArguments {
  const Tensor& out;
  const OptionalTensor& lse;
  const Tensor& q;
  const Tensor& k_pages;
  const OptionalTensor& v_pages;
  const Tensor& k_block_scales;
  const OptionalTensor& v_block_scales;
  const Tensor& page_table;
  const OptionalTensor& kv_indptr;
  const Tensor& cache_seqlens;
  double softmax_scale;
  int64_t window_left;
  double logit_cap;
  const OptionalTensor &sinks, &k_scale, &v_scale, &report, &out_partial, &lse_partial;
};

inline DecodeParams checked_decode(const DecodeArguments& a) {
  const char* op = "fp4_decode";
  Dim batch("batch_size"), seqlen_q("seqlen_q"), q_heads("num_q_heads"), kv_heads("num_kv_heads"), dim("head_dim");
  Dim num_pages("num_pages"), page_size("page_size"), max_pages("max_pages"), dim_v("head_dim_v");
  const auto check = [&](const char* name, const Tensor& tensor) {
    return TensorCheck(op, name, tensor).device_as("q", a.q);
  };
  check("q", a.q)
      .dtype({DType::kFloat32, DType::kFloat16, DType::kBFloat16})
      .shape({batch, seqlen_q, q_heads, dim})
      .size_at_least(1, "seqlen_q", 1, "a request brings a token")
      .dense_last();
  check("out", a.out).dtype_as("q", a.q).shape({batch, seqlen_q, q_heads, dim_v}).dense_last().apart();
  if (a.lse) check("lse", *a.lse).dtype({DType::kFloat32}).shape({batch, seqlen_q, q_heads}).contiguous();
  check("k_pages", a.k_pages);
  const Pages k = checked_pages(op, "k", a.k_pages, a.k_block_scales, a.k_scale, num_pages, page_size, kv_heads, *dim);
  Pages v{};
  if (checked_v(op, a.v_pages, a.v_block_scales)) {
    check("v_pages", *a.v_pages);
    v = checked_pages(op, "v", *a.v_pages, *a.v_block_scales, a.v_scale, num_pages, page_size, kv_heads, *dim_v);
  } else {
    if (a.v_scale) fail(op, "v_scale must be None without v_pages: values are those of k_pages");
    check_range(op, "out.shape[3] (head_dim_v, the first of a row of k_pages)", *dim_v, 1, *dim);
  }
  if (*kv_heads < 1 || *q_heads % *kv_heads != 0) {
    fail(op, "q.shape[2] (num_q_heads) must be a multiple of " + std::to_string(*kv_heads) + " (num_kv_heads), got " +
                 std::to_string(*q_heads));
  }
  check("cache_seqlens", a.cache_seqlens).dtype({DType::kInt32}).shape({batch}).contiguous();
  Dim bounds("batch_size + 1", *batch + 1, "q"), num_indices("num_indices");
  if (a.kv_indptr) {
    check("kv_indptr", *a.kv_indptr).dtype({DType::kInt32}).shape({bounds}).contiguous();
    check("page_table", a.page_table).dtype({DType::kInt32}).shape({num_indices}).contiguous();
  } else {
    check("page_table", a.page_table).dtype({DType::kInt32}).shape({batch, max_pages}).dense_last();
  }
  Dim num_splits("num_splits");
  if (a.out_partial.has_value() != a.lse_partial.has_value()) {
    fail(op, "out_partial and lse_partial must be given together");
  }
  if (a.out_partial) {
    check("out_partial", *a.out_partial)
        .dtype({DType::kFloat32})
        .shape({num_splits, batch, seqlen_q, q_heads, dim_v})
        .contiguous();
    check("lse_partial", *a.lse_partial)
        .dtype({DType::kFloat32})
        .shape({num_splits, batch, seqlen_q, q_heads})
        .contiguous();
    check_range(op, "num_splits", *num_splits, 1, 1024);
  }
  check_range(op, "window_left", a.window_left, -1, INT32_MAX - (1 << 16));
  check_finite(op, "softmax_scale", a.softmax_scale);
  check_finite(op, "logit_cap", a.logit_cap);
  if (a.logit_cap < 0) fail(op, "logit_cap must be 0 (off) or more, got " + std::to_string(a.logit_cap));
  if (a.sinks) check("sinks", *a.sinks).dtype({DType::kFloat32}).shape({q_heads}).contiguous();
  const bool csr = a.kv_indptr.has_value();
  return {.batch_size = batch.as_int(),
          .seqlen_q = seqlen_q.as_int(),
          .num_q_heads = q_heads.as_int(),
          .num_kv_heads = kv_heads.as_int(),
          .head_dim = dim.as_int(),
          .head_dim_v = dim_v.as_int(),
          .q = a.q.const_data_ptr(),
          .q_stride_request = a.q.stride(0),
          .q_stride_token = a.q.stride(1),
          .q_stride_head = a.q.stride(2),
          .k = k,
          .v = v,
          .page_table = {.cells = static_cast<const int32_t*>(a.page_table.const_data_ptr()),
                         .kv_indptr = data_or_null<const int32_t>(a.kv_indptr),
                         .stride_request = csr ? 0 : a.page_table.stride(0),
                         .num_pages = *num_pages,
                         .page_size = page_size.as_int(),
                         .max_pages = csr ? 0 : a.page_table.size(1),
                         .num_indices = csr ? a.page_table.size(0) : 0},
          .cache_seqlens = static_cast<const int32_t*>(a.cache_seqlens.const_data_ptr()),
          .out = a.out.mutable_data_ptr(),
          .out_stride_request = a.out.stride(0),
          .out_stride_token = a.out.stride(1),
          .out_stride_head = a.out.stride(2),
          .lse = data_or_null<float>(a.lse),
          .num_splits = a.out_partial ? num_splits.as_int() : 0,
          .out_partial = data_or_null<float>(a.out_partial),
          .lse_partial = data_or_null<float>(a.lse_partial),
          .softmax_scale = static_cast<float>(a.softmax_scale),
          .window_left = static_cast<int>(a.window_left),
          .logit_cap = static_cast<float>(a.logit_cap),
          .sinks = data_or_null<const float>(a.sinks),
          .dtype = dtype_of(a.q),
          .report = checked_report(op, a.report, "q", a.q)};
}

}  // namespace attnops::fp4_kv
