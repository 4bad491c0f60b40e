#pragma once
#include "layer_call/checks.h"

namespace attnops::layer_call {

// The arguments of xqa_layer as the schema names them.
struct XqaArguments {
  const Tensor& out;
  const Tensor& q;
  const OptionalTensor& k;
  const OptionalTensor& v;
  const OptionalTensor& out_cache_loc;
  const Tensor& cache_seqlens;
  const OptionalTensor& tree_mask;
  const OptionalTensor& sinks;
  const OptionalTensor& k_scale;
  const OptionalTensor& v_scale;
};

inline constexpr const char* kXqaLayer = "xqa_layer";

inline paged_kv::KvStore kv_store(const Rows& rows, const void* pages, int64_t stride_page, int64_t stride_token,
                                  int64_t stride_head, int head_dim, const Scale& scale) {
  return {.pages = const_cast<void*>(pages),
          .stride_page = stride_page,
          .stride_page_token = stride_token,
          .stride_page_head = stride_head,
          .rows = rows.data,
          .stride_token = rows.stride_token,
          .stride_head = rows.stride_head,
          .head_dim = head_dim,
          .scale = scale.data,
          .scale_stride = scale.stride};
}

inline void take_scales(const char* op, xqa_decode::Params& p, const OptionalTensor& k_scale,
                        const OptionalTensor& v_scale, const Tensor& q) {
  const bool fp8 = size_of(p.kv_dtype) == 1;
  const Scale k = checked_scale(op, "k_scale", k_scale, q, fp8, p.num_kv_heads);
  const Scale v = checked_scale(op, "v_scale", v_scale, q, fp8, p.num_kv_heads);
  p.k_scale = k.data, p.k_scale_stride = k.stride;
  p.v_scale = v.data, p.v_scale_stride = v.stride;
}

inline paged_kv::StoreKvParams checked_store(const XqaArguments& a, const xqa_decode::Params& p) {
  if (!a.v) fail(kXqaLayer, "v must be given with k");
  const DType dtype = checked_new_rows(kXqaLayer, "k", *a.k, a.q, p.kv_dtype, a.k_scale.has_value());
  TensorCheck(kXqaLayer, "v", *a.v).device_as("q", a.q).dtype_as("k", *a.k);
  const Rows k = checked_rows(kXqaLayer, "k", *a.k, p.num_kv_heads, p.head_dim);
  const Rows v = checked_rows(kXqaLayer, "v", *a.v, p.num_kv_heads, p.head_dim);
  if (k.tokens != v.tokens) {
    fail(kXqaLayer,
         "v.shape[0] (num_tokens) must be " + std::to_string(k.tokens) + " as in k, got " + std::to_string(v.tokens));
  }
  return {.target = checked_target(kXqaLayer, a.out_cache_loc, a.q, k.tokens, p.page_table, p.report),
          .k = kv_store(k, p.k_pages, p.k_stride_page, p.k_stride_token, p.k_stride_head, p.head_dim,
                        {p.k_scale, p.k_scale_stride}),
          .v = kv_store(v, p.v_pages, p.v_stride_page, p.v_stride_token, p.v_stride_head, p.head_dim,
                        {p.v_scale, p.v_scale_stride}),
          .num_heads = p.num_kv_heads,
          .dtype = dtype,
          .page_dtype = p.kv_dtype};
}

inline XqaCall checked_call(const XqaArguments& a, const XqaBound& bound) {
  XqaCall call{bound.decode, std::nullopt, false, nullptr};
  xqa_decode::Params& p = call.decode;
  const Rows q =
      checked_queries(kXqaLayer, "q", a.q, a.q, p.dtype, p.batch_size, p.seqlen_q, p.num_q_heads, p.head_dim);
  const Rows out =
      checked_queries(kXqaLayer, "out", a.out, a.q, p.dtype, p.batch_size, p.seqlen_q, p.num_q_heads, p.head_dim);
  TensorCheck(kXqaLayer, "out", a.out).apart();
  p.q = q.data, p.q_stride_token = q.stride_token, p.q_stride_head = q.stride_head;
  p.q_stride_request = q.stride_token * p.seqlen_q;
  p.out = out.data, p.out_stride_token = out.stride_token, p.out_stride_head = out.stride_head;
  p.out_stride_request = out.stride_token * p.seqlen_q;
  p.cache_seqlens = checked_seqlens(kXqaLayer, a.cache_seqlens, a.q, p.batch_size);
  take_options(kXqaLayer, p, a.tree_mask, a.sinks, a.q);
  take_scales(kXqaLayer, p, a.k_scale, a.v_scale, a.q);
  if (a.k) call.store = checked_store(a, p);
  return call;
}

// The arguments of xqa_pages_layer as the schema names them: a call brings its pages, and what was bound are plan and
// options.
struct XqaPagesArguments {
  const Tensor& out;
  const Tensor& q;
  const Tensor& k_pages;
  const Tensor& v_pages;
  const Tensor& page_table;
  const Tensor& cache_seqlens;
  const OptionalTensor& tree_mask;
  const OptionalTensor& sinks;
  const OptionalTensor& k_scale;
  const OptionalTensor& v_scale;
};

inline constexpr const char* kXqaPagesLayer = "xqa_pages_layer";

// q, K or V by token, or with heads first; `Strides` are of dims 0 to 2 as xqa_decode has them.
struct Strides {
  int64_t first, token, head;
};

inline Strides checked_by_token(const TensorCheck& check, const Tensor& tensor, bool heads_first, Dim& first,
                                Dim& tokens, Dim& heads, Dim& dim) {
  if (heads_first) {
    check.shape({first, heads, tokens, dim}).dense_last();
    return {tensor.stride(0), tensor.stride(2), tensor.stride(1)};
  }
  check.shape({first, tokens, heads, dim}).dense_last();
  return {tensor.stride(0), tensor.stride(1), tensor.stride(2)};
}

inline void take_pages(const XqaPagesArguments& a, bool heads_first, xqa_decode::Params& p) {
  constexpr const char* kOp = kXqaPagesLayer;
  Dim pages("num_pages"), page_size("page_size"), heads("num_kv_heads", p.num_kv_heads, "the bound plan");
  Dim dim("head_dim", p.head_dim, "the bound plan"), batch("batch_size", p.batch_size, "the bound plan");
  Dim max_pages("max_pages");
  const TensorCheck k_check(kOp, "k_pages", a.k_pages), v_check(kOp, "v_pages", a.v_pages);
  k_check.device_as("q", a.q).dtype({p.kv_dtype}), v_check.device_as("q", a.q).dtype({p.kv_dtype});
  const Strides k = checked_by_token(k_check, a.k_pages, heads_first, pages, page_size, heads, dim);
  const Strides v = checked_by_token(v_check, a.v_pages, heads_first, pages, page_size, heads, dim);
  check_range(kOp, "page_size (of k_pages)", *page_size, 1, INT32_MAX);
  const TensorCheck table(kOp, "page_table", a.page_table);
  table.device_as("q", a.q).dtype({DType::kInt32}).shape({batch, max_pages}).dense_last();
  p.k_pages = a.k_pages.const_data_ptr(), p.v_pages = a.v_pages.const_data_ptr();
  p.k_stride_page = k.first, p.k_stride_token = k.token, p.k_stride_head = k.head;
  p.v_stride_page = v.first, p.v_stride_token = v.token, p.v_stride_head = v.head;
  p.page_table = {.cells = static_cast<const int32_t*>(a.page_table.const_data_ptr()),
                  .kv_indptr = nullptr,
                  .stride_request = a.page_table.stride(0),
                  .num_pages = *pages,
                  .page_size = page_size.as_int(),
                  .max_pages = *max_pages,
                  .num_indices = 0};
  p.table_tokens = p.page_table.num_tokens(0);
}

inline XqaCall checked_call(const XqaPagesArguments& a, const XqaBound& bound) {
  constexpr const char* kOp = kXqaPagesLayer;
  XqaCall call{bound.decode, std::nullopt, true, nullptr};
  xqa_decode::Params& p = call.decode;
  if (p.fixed_split_tokens > 0) {
    fail(kOp, "bound must have a plan with fixed_split_tokens 0, got " + std::to_string(p.fixed_split_tokens));
  }
  Dim batch("batch_size", p.batch_size, "the bound plan"), tokens("seqlen_q", p.seqlen_q, "the bound plan");
  Dim heads("num_q_heads", p.num_q_heads, "the bound plan"), dim("head_dim", p.head_dim, "the bound plan");
  const TensorCheck q_check(kOp, "q", a.q), out_check(kOp, "out", a.out);
  q_check.dtype({p.dtype});
  out_check.device_as("q", a.q).dtype({p.dtype});
  const Strides q = checked_by_token(q_check, a.q, bound.heads_first, batch, tokens, heads, dim);
  const Strides out = checked_by_token(out_check, a.out, false, batch, tokens, heads, dim);
  out_check.apart();
  p.q = a.q.const_data_ptr(), p.out = a.out.mutable_data_ptr();
  p.q_stride_request = q.first, p.q_stride_token = q.token, p.q_stride_head = q.head;
  p.out_stride_request = out.first, p.out_stride_token = out.token, p.out_stride_head = out.head;
  take_pages(a, bound.heads_first, p);
  p.cache_seqlens = checked_seqlens(kOp, a.cache_seqlens, a.q, p.batch_size);
  take_options(kOp, p, a.tree_mask, a.sinks, a.q);
  take_scales(kOp, p, a.k_scale, a.v_scale, a.q);
  return call;
}

// The call with other addresses, in the schema's order. Of `brings_pages`, k, v and slots are its pages and page table.
inline XqaCall moved(XqaCall call, void* const* addresses) {
  const auto [out, q, k, v, slots, seqlens, tree_mask, sinks, k_scale, v_scale] = addresses_of(addresses);
  xqa_decode::Params& p = call.decode;
  p.out = out, p.q = q;
  p.cache_seqlens = static_cast<const int32_t*>(seqlens);
  p.tree_mask = static_cast<const uint8_t*>(tree_mask);
  p.sinks = static_cast<const float*>(sinks);
  p.k_scale = static_cast<const float*>(k_scale), p.v_scale = static_cast<const float*>(v_scale);
  if (call.brings_pages) {
    p.k_pages = k, p.v_pages = v;
    p.page_table.cells = static_cast<const int32_t*>(slots);
  }
  if (call.store) {
    call.store->target.out_cache_loc.data = slots;
    call.store->k.rows = k, call.store->k.scale = p.k_scale;
    call.store->v.rows = v, call.store->v.scale = p.v_scale;
  }
  return call;
}

}  // namespace attnops::layer_call
