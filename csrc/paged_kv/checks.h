#pragma once
#include <optional>

#include "paged_kv/params.h"
#include "torch_bindings/check.h"
#include "torch_bindings/index_checks.h"

// The ops' whole contract, checked once for all devices. Params exist only when the arguments are right.
namespace attnops::paged_kv {

inline Requests checked_requests(const char* op, const Tensor& req_to_token, const Tensor& req_pool_indices,
                                 const Tensor& cache_seqlens, int64_t page_size, const OptionalTensor& slot_map,
                                 const OptionalTensor& report, Dim& batch_size) {
  Dim max_requests("max_requests"), max_context("max_context"), num_slots("num_slots");
  check_range(op, "page_size", page_size, 1, INT32_MAX);
  TensorCheck(op, "req_to_token", req_to_token).dtype({DType::kInt32}).shape({max_requests, max_context}).dense_last();
  TensorCheck(op, "cache_seqlens", cache_seqlens)
      .device_as("req_to_token", req_to_token)
      .dtype({DType::kInt32})
      .shape({batch_size})
      .contiguous();
  const IndexArray rows =
      checked_indices(op, "req_pool_indices", req_pool_indices, batch_size, "req_to_token", req_to_token);
  const IndexArray map =
      slot_map ? checked_indices(op, "slot_map", *slot_map, num_slots, "req_to_token", req_to_token) : IndexArray{};
  return {.batch_size = batch_size.as_int(),
          .req_to_token = static_cast<const int32_t*>(req_to_token.const_data_ptr()),
          .req_to_token_stride = req_to_token.stride(0),
          .max_requests = *max_requests,
          .max_tokens = max_context.as_int(),
          .req_pool_indices = rows,
          .cache_seqlens = static_cast<const int32_t*>(cache_seqlens.const_data_ptr()),
          .first_tokens = nullptr,
          .page_size = static_cast<int>(page_size),
          .page_shift = shift_of(page_size),
          .slot_map = map,
          .checked = report.has_value(),
          .report = checked_report(op, report, "req_to_token", req_to_token)};
}

inline PageTableParams checked_page_table(const Tensor& page_table, const Tensor& req_to_token,
                                          const Tensor& req_pool_indices, const Tensor& cache_seqlens,
                                          int64_t page_size, const OptionalTensor& slot_map,
                                          const OptionalTensor& report) {
  Dim batch_size("batch_size"), max_pages("max_pages");
  PageTableParams params{.requests = checked_requests("build_page_table", req_to_token, req_pool_indices, cache_seqlens,
                                                      page_size, slot_map, report, batch_size),
                         .page_table = nullptr,
                         .page_table_stride = 0,
                         .max_pages = 0};
  TensorCheck("build_page_table", "page_table", page_table)
      .device_as("req_to_token", req_to_token)
      .dtype({DType::kInt32})
      .shape({batch_size, max_pages})
      .dense_last()
      .apart();
  params.page_table = static_cast<int32_t*>(page_table.mutable_data_ptr());
  params.page_table_stride = page_table.stride(0);
  params.max_pages = max_pages.as_int();
  if (*max_pages * page_size < params.requests.max_tokens) {
    params.requests.max_tokens = static_cast<int>(*max_pages * page_size);
  }
  return params;
}

inline KvIndicesParams checked_kv_indices(const Tensor& kv_indptr, const Tensor& kv_indices,
                                          const OptionalTensor& kv_last_page_len, const Tensor& req_to_token,
                                          const Tensor& req_pool_indices, const Tensor& cache_seqlens,
                                          int64_t page_size, const OptionalTensor& slot_map,
                                          const OptionalTensor& report, const OptionalTensor& kv_start_idx) {
  const char* op = "build_kv_indices";
  Dim batch_size("batch_size"), num_indices("num_indices");
  Requests requests =
      checked_requests(op, req_to_token, req_pool_indices, cache_seqlens, page_size, slot_map, report, batch_size);
  Dim indptr_size("batch_size + 1", *batch_size + 1, "cache_seqlens");
  TensorCheck(op, "kv_indptr", kv_indptr)
      .device_as("req_to_token", req_to_token)
      .dtype({DType::kInt32})
      .shape({indptr_size})
      .contiguous();
  TensorCheck(op, "kv_indices", kv_indices)
      .device_as("req_to_token", req_to_token)
      .dtype({DType::kInt32})
      .shape({num_indices})
      .contiguous();
  if (kv_last_page_len) {
    TensorCheck(op, "kv_last_page_len", *kv_last_page_len)
        .device_as("req_to_token", req_to_token)
        .dtype({DType::kInt32})
        .shape({batch_size})
        .contiguous();
  }
  if (kv_start_idx) {
    TensorCheck(op, "kv_start_idx", *kv_start_idx)
        .device_as("req_to_token", req_to_token)
        .dtype({DType::kInt32})
        .shape({batch_size})
        .contiguous();
    requests.first_tokens = static_cast<const int32_t*>(kv_start_idx->const_data_ptr());
  }
  return {.requests = requests,
          .kv_indptr = static_cast<int32_t*>(kv_indptr.mutable_data_ptr()),
          .kv_indices = static_cast<int32_t*>(kv_indices.mutable_data_ptr()),
          .kv_last_page_len = data_or_null<int32_t>(kv_last_page_len),
          .num_indices = *num_indices};
}

inline CuSeqlensParams checked_cu_seqlens(const Tensor& cu_seqlens, const Tensor& seqlens) {
  Dim batch_size("batch_size");
  TensorCheck("build_cu_seqlens", "seqlens", seqlens).dtype({DType::kInt32}).shape({batch_size}).contiguous();
  Dim cu_size("batch_size + 1", *batch_size + 1, "seqlens");
  TensorCheck("build_cu_seqlens", "cu_seqlens", cu_seqlens)
      .device_as("seqlens", seqlens)
      .dtype({DType::kInt32})
      .shape({cu_size})
      .contiguous();
  return {.batch_size = batch_size.as_int(),
          .cu_seqlens = static_cast<int32_t*>(cu_seqlens.mutable_data_ptr()),
          .seqlens = static_cast<const int32_t*>(seqlens.const_data_ptr())};
}

inline TranslateParams checked_translate(const Tensor& out, const Tensor& slots, const Tensor& slot_map,
                                         const OptionalTensor& report) {
  const char* op = "translate_slots";
  Dim num_tokens("num_tokens"), num_slots("num_slots");
  const IndexArray from = checked_indices(op, "slots", slots, num_tokens, "slots", slots);
  const IndexArray map = checked_indices(op, "slot_map", slot_map, num_slots, "slots", slots);
  const IndexArray to = checked_indices(op, "out", out, num_tokens, "slots", slots);
  TensorCheck(op, "out", out).apart();
  return {.num_slots = *num_tokens,
          .out = out.mutable_data_ptr(),
          .out_stride = to.stride,
          .out_wide = to.wide,
          .slots = from,
          .slot_map = map,
          .report = checked_report(op, report, "slots", slots)};
}

inline StoreTarget store_target(const IndexArray& out_cache_loc, const Tensor& pages, int32_t* report) {
  return {.num_tokens = out_cache_loc.size,
          .out_cache_loc = out_cache_loc,
          .page_size = static_cast<int>(pages.size(1)),
          .page_shift = shift_of(pages.size(1)),
          .num_slots = pages.size(0) * pages.size(1),
          .report = report};
}

// Rows may be copied as they are, or quantized to FP8 pages.
inline void check_page_dtype(const char* op, const char* name, const Tensor& pages, const char* rows_name,
                             const Tensor& rows) {
  TensorCheck(op, name, pages)
      .dtype({DType::kFloat32, DType::kFloat16, DType::kBFloat16, DType::kFloat8E4M3, DType::kFloat8E5M2});
  if (dtype_of(pages) == dtype_of(rows)) return;
  const bool fp8 = has_dtype(pages, DType::kFloat8E4M3) || has_dtype(pages, DType::kFloat8E5M2);
  const bool quantizes = fp8 && size_of(dtype_of(rows)) > 1;
  if (!quantizes) {
    fail(op, std::string(name) + " must have dtype " + name_of(dtype_of(rows)) + " as " + rows_name +
                 ", or float8_e4m3fn or float8_e5m2 to quantize float32, float16 or bfloat16; got " +
                 name_of(dtype_of(pages)));
  }
}

inline void check_scale(const char* op, const char* name, const OptionalTensor& scale, const Tensor& pages,
                        const char* pages_name, const Tensor& rows, int64_t num_heads) {
  if (!scale) return;
  Dim extent("num_scales");
  TensorCheck(op, name, *scale).device_as(pages_name, pages).dtype({DType::kFloat32}).shape({extent}).contiguous();
  if (*extent != 1 && *extent != num_heads) {
    const std::string per_head = num_heads == 1 ? "" : " or " + std::to_string(num_heads) + " (num_heads)";
    fail(op, std::string(name) + ".shape[0] (num_scales) must be 1" + per_head + ", got " + std::to_string(*extent));
  }
  if (dtype_of(pages) == dtype_of(rows)) {
    fail(op, std::string(name) + " must be absent where " + pages_name + " holds the rows' own dtype (" +
                 name_of(dtype_of(rows)) + "): nothing is scaled");
  }
}

inline StoreKvParams checked_store_kv(const Tensor& k_pages, const Tensor& v_pages, const Tensor& k, const Tensor& v,
                                      const Tensor& out_cache_loc, const OptionalTensor& k_scale,
                                      const OptionalTensor& v_scale, const OptionalTensor& report) {
  const char* op = "store_kv";
  Dim num_tokens("num_tokens"), num_heads("num_heads"), num_pages("num_pages"), page_size("page_size");
  Dim head_dim_k("head_dim_k"), head_dim_v("head_dim_v");
  const auto side = [&](const char* pages_name, const Tensor& pages, const char* rows_name, const Tensor& rows,
                        const char* scale_name, const OptionalTensor& scale, Dim& head_dim) {
    TensorCheck(op, rows_name, rows)
        .device_as("k_pages", k_pages)
        .dtype({DType::kFloat32, DType::kFloat16, DType::kBFloat16, DType::kFloat8E4M3, DType::kFloat8E5M2})
        .dtype_as("k", k)
        .shape({num_tokens, num_heads, head_dim})
        .dense_last();
    TensorCheck(op, pages_name, pages)
        .device_as("k_pages", k_pages)
        .dtype_as("k_pages", k_pages)
        .shape({num_pages, page_size, num_heads, head_dim})
        .size_at_least(1, "page_size", 1, "a page holds a token")
        .dense_last()
        .apart();
    check_page_dtype(op, pages_name, pages, rows_name, rows);
    check_scale(op, scale_name, scale, pages, pages_name, rows, *num_heads);
    return KvStore{.pages = pages.mutable_data_ptr(),
                   .stride_page = pages.stride(0),
                   .stride_page_token = pages.stride(1),
                   .stride_page_head = pages.stride(2),
                   .rows = rows.const_data_ptr(),
                   .stride_token = rows.stride(0),
                   .stride_head = rows.stride(1),
                   .head_dim = head_dim.as_int(),
                   .scale = data_or_null<const float>(scale),
                   .scale_stride = scale && scale->size(0) > 1 ? 1 : 0};
  };
  const KvStore k_side = side("k_pages", k_pages, "k", k, "k_scale", k_scale, head_dim_k);
  const KvStore v_side = side("v_pages", v_pages, "v", v, "v_scale", v_scale, head_dim_v);
  const IndexArray slots = checked_indices(op, "out_cache_loc", out_cache_loc, num_tokens, "k_pages", k_pages);
  return {.target = store_target(slots, k_pages, checked_report(op, report, "k_pages", k_pages)),
          .k = k_side,
          .v = v_side,
          .num_heads = num_heads.as_int(),
          .dtype = dtype_of(k),
          .page_dtype = dtype_of(k_pages)};
}

inline StoreMlaParams checked_store_mla(const Tensor& kv_pages, const Tensor& latent, const OptionalTensor& k_pe,
                                        const Tensor& out_cache_loc, const OptionalTensor& kv_scale,
                                        const OptionalTensor& report) {
  const char* op = "store_mla_kv";
  Dim num_tokens("num_tokens"), num_pages("num_pages"), page_size("page_size");
  Dim row_dim = k_pe ? Dim("kv_lora_rank", kLatentDim, "an MLA row with k_pe given")
                     : Dim("latent_dim", kMlaDim, "an MLA row without k_pe");
  TensorCheck(op, "latent", latent)
      .device_as("kv_pages", kv_pages)
      .dtype({DType::kFloat32, DType::kFloat16, DType::kBFloat16, DType::kFloat8E4M3})
      .shape({num_tokens, row_dim})
      .dense_last();
  Dim rope_dim("rope_dim", kRopeDim, "an MLA row");
  if (k_pe) {
    TensorCheck(op, "k_pe", *k_pe)
        .device_as("kv_pages", kv_pages)
        .dtype_as("latent", latent)
        .shape({num_tokens, rope_dim})
        .dense_last();
  }
  const bool fp8_rows = has_dtype(kv_pages, DType::kUInt8);
  Dim page_dim =
      fp8_rows ? Dim("row_bytes", kFp8RowBytes, "the uint8 MLA row") : Dim("latent_dim", kMlaDim, "an MLA row");
  TensorCheck(op, "kv_pages", kv_pages)
      .shape({num_pages, page_size, page_dim})
      .size_at_least(1, "page_size", 1, "a page holds a token")
      .dense_last()
      .apart();
  if (fp8_rows) {
    TensorCheck(op, "latent", latent).dtype({DType::kFloat32, DType::kFloat16, DType::kBFloat16});
    if (kv_scale) fail(op, "kv_scale must be absent where kv_pages is uint8: a 656-byte row carries its own scales");
  } else {
    check_page_dtype(op, "kv_pages", kv_pages, "latent", latent);
    check_scale(op, "kv_scale", kv_scale, kv_pages, "kv_pages", latent, 1);
  }
  const IndexArray slots = checked_indices(op, "out_cache_loc", out_cache_loc, num_tokens, "kv_pages", kv_pages);
  const char* rows = static_cast<const char*>(latent.const_data_ptr());
  return {.target = store_target(slots, kv_pages, checked_report(op, report, "kv_pages", kv_pages)),
          .kv_pages = kv_pages.mutable_data_ptr(),
          .stride_page = kv_pages.stride(0),
          .stride_page_token = kv_pages.stride(1),
          .latent = rows,
          .latent_stride = latent.stride(0),
          .k_pe = k_pe ? k_pe->const_data_ptr() : rows + kLatentDim * size_of(dtype_of(latent)),
          .k_pe_stride = k_pe ? k_pe->stride(0) : latent.stride(0),
          .kv_scale = data_or_null<const float>(kv_scale),
          .dtype = dtype_of(latent),
          .page_dtype = dtype_of(kv_pages)};
}

void run_cpu(const StoreKvParams& params);  // op_cpu.cpp
void run_cpu(const StoreMlaParams& params);

}  // namespace attnops::paged_kv
