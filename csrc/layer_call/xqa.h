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
  XqaCall call{bound.decode, std::nullopt, nullptr};
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
  const bool fp8 = size_of(p.kv_dtype) == 1;
  const Scale k_scale = checked_scale(kXqaLayer, "k_scale", a.k_scale, a.q, fp8, p.num_kv_heads);
  const Scale v_scale = checked_scale(kXqaLayer, "v_scale", a.v_scale, a.q, fp8, p.num_kv_heads);
  p.k_scale = k_scale.data, p.k_scale_stride = k_scale.stride;
  p.v_scale = v_scale.data, p.v_scale_stride = v_scale.stride;
  if (a.k) call.store = checked_store(a, p);
  return call;
}

// The call with other addresses, in the schema's order.
inline XqaCall moved(XqaCall call, void* const* addresses) {
  const auto [out, q, k, v, slots, seqlens, tree_mask, sinks, k_scale, v_scale] = addresses_of(addresses);
  xqa_decode::Params& p = call.decode;
  p.out = out, p.q = q;
  p.cache_seqlens = static_cast<const int32_t*>(seqlens);
  p.tree_mask = static_cast<const uint8_t*>(tree_mask);
  p.sinks = static_cast<const float*>(sinks);
  p.k_scale = static_cast<const float*>(k_scale), p.v_scale = static_cast<const float*>(v_scale);
  if (call.store) {
    call.store->target.out_cache_loc.data = slots;
    call.store->k.rows = k, call.store->k.scale = p.k_scale;
    call.store->v.rows = v, call.store->v.scale = p.v_scale;
  }
  return call;
}

}  // namespace attnops::layer_call
