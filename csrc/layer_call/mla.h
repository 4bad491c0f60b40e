#pragma once
#include "layer_call/checks.h"

namespace attnops::layer_call {

// The arguments of mla_layer as the schema names them.
struct MlaArguments {
  const Tensor& out;
  const Tensor& q;
  const OptionalTensor& q_pe;
  const OptionalTensor& latent;
  const OptionalTensor& k_pe;
  const OptionalTensor& out_cache_loc;
  const Tensor& cache_seqlens;
  const OptionalTensor& tree_mask;
  const OptionalTensor& sinks;
  const OptionalTensor& kv_scale;
};

inline constexpr const char* kMlaLayer = "mla_layer";

// Where the rotary part is in rows that hold both.
inline const void* behind_latent(const void* latent, DType dtype) {
  return static_cast<const char*>(latent) + paged_kv::kLatentDim * size_of(dtype);
}

inline paged_kv::StoreMlaParams checked_store(const MlaArguments& a, const mla_decode::Params& p) {
  using paged_kv::kLatentDim, paged_kv::kRopeDim;
  const bool scaled = p.kv_dtype == DType::kFloat8E4M3 && a.kv_scale.has_value();
  const DType dtype = checked_new_rows(kMlaLayer, "latent", *a.latent, a.q, p.kv_dtype, scaled);
  const int64_t row_dim = a.k_pe ? kLatentDim : paged_kv::kMlaDim;
  const Rows latent = checked_rows(kMlaLayer, "latent", *a.latent, 1, row_dim);
  const void* pe = behind_latent(latent.data, dtype);
  int64_t pe_stride = latent.stride_token;
  if (a.k_pe) {
    TensorCheck(kMlaLayer, "k_pe", *a.k_pe).device_as("q", a.q).dtype_as("latent", *a.latent);
    const Rows rows = checked_rows(kMlaLayer, "k_pe", *a.k_pe, 1, kRopeDim);
    if (rows.tokens != latent.tokens) {
      fail(kMlaLayer, "k_pe.shape[0] (num_tokens) must be " + std::to_string(latent.tokens) + " as in latent, got " +
                          std::to_string(rows.tokens));
    }
    pe = rows.data, pe_stride = rows.stride_token;
  }
  return {.target = checked_target(kMlaLayer, a.out_cache_loc, a.q, latent.tokens, p.page_table, p.report),
          .kv_pages = const_cast<void*>(p.kv_pages),
          .stride_page = p.kv_stride_page,
          .stride_page_token = p.kv_stride_token,
          .latent = latent.data,
          .latent_stride = latent.stride_token,
          .k_pe = pe,
          .k_pe_stride = pe_stride,
          .kv_scale = p.kv_scale,
          .dtype = dtype,
          .page_dtype = p.kv_dtype};
}

inline MlaCall checked_call(const MlaArguments& a, const MlaBound& bound) {
  using namespace mla_decode;
  MlaCall call{bound.decode, std::nullopt, nullptr};
  Params& p = call.decode;
  const auto queries = [&](const char* name, const Tensor& rows, int64_t dim) {
    return checked_queries(kMlaLayer, name, rows, a.q, p.dtype, p.batch_size, p.seqlen_q, p.num_q_heads, dim);
  };
  const Rows q = queries("q", a.q, a.q_pe ? kHeadDimV : kHeadDimQk);
  p.q = q.data, p.q_stride_token = q.stride_token, p.q_stride_head = q.stride_head;
  p.q_stride_request = q.stride_token * p.seqlen_q;
  p.q_pe = nullptr;
  if (a.q_pe) {
    const Rows pe = queries("q_pe", *a.q_pe, kHeadDimRope);
    p.q_pe = pe.data, p.q_pe_stride_token = pe.stride_token, p.q_pe_stride_head = pe.stride_head;
    p.q_pe_stride_request = pe.stride_token * p.seqlen_q;
  }
  const Rows out = queries("out", a.out, kHeadDimV);
  TensorCheck(kMlaLayer, "out", a.out).apart();
  p.out = out.data, p.out_stride_token = out.stride_token, p.out_stride_head = out.stride_head;
  p.out_stride_request = out.stride_token * p.seqlen_q;
  p.cache_seqlens = checked_seqlens(kMlaLayer, a.cache_seqlens, a.q, p.batch_size);
  take_options(kMlaLayer, p, a.tree_mask, a.sinks, a.q);
  p.kv_scale = checked_scale(kMlaLayer, "kv_scale", a.kv_scale, a.q, p.kv_dtype == DType::kFloat8E4M3, 1).data;
  if (a.latent) call.store = checked_store(a, p);
  return call;
}

// The call with other addresses, in the schema's order.
inline MlaCall moved(MlaCall call, void* const* addresses) {
  const auto [out, q, q_pe, latent, k_pe, slots, seqlens, tree_mask, sinks, kv_scale] = addresses_of(addresses);
  mla_decode::Params& p = call.decode;
  p.out = out, p.q = q, p.q_pe = q_pe;
  p.cache_seqlens = static_cast<const int32_t*>(seqlens);
  p.tree_mask = static_cast<const uint8_t*>(tree_mask);
  p.sinks = static_cast<const float*>(sinks);
  p.kv_scale = static_cast<const float*>(kv_scale);
  if (call.store) {
    call.store->target.out_cache_loc.data = slots;
    call.store->latent = latent;
    call.store->k_pe = k_pe ? k_pe : behind_latent(latent, call.store->dtype);
    call.store->kv_scale = p.kv_scale;
  }
  return call;
}

}  // namespace attnops::layer_call
