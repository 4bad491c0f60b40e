#pragma once
#include <cstring>

#include "cpu/convert.h"
#include "cpu/row_rounding.h"
#include "sparse_indexer/keys.h"

// Each function takes a range of rows, so that the caller splits the work over its threads.
namespace attnops::sparse_indexer::cpu {

inline float element(DType dtype, const void* data, int64_t i) {
  if (dtype == DType::kFloat32) return static_cast<const float*>(data)[i];
  using namespace attnops::cpu;
  return dtype == DType::kFloat16 ? to_float(static_cast<const Float16*>(data)[i])
                                  : to_float(static_cast<const BFloat16*>(data)[i]);
}

// `dim` values from element `at` on.
inline void load_values(DType dtype, const void* data, int64_t at, int dim, float* x) {
  if (dtype == DType::kBFloat16) {
    const auto* from = static_cast<const attnops::cpu::BFloat16*>(data) + at;
    for (int i = 0; i < dim; ++i) x[i] = attnops::cpu::to_float(from[i]);
  } else {
    for (int i = 0; i < dim; ++i) x[i] = element(dtype, data, at + i);
  }
}

using attnops::cpu::RowRounding;

// `dim` values from element `at` on, as e4m3; returns their scale.
inline float quantize_row(const RowRounding* rounding, const Quantization& how, DType dtype, const void* data,
                          int64_t at, int dim, uint8_t* out) {
  float x[128];
  load_values(dtype, data, at, dim, x);
  return attnops::cpu::quantize_key(rounding, how, x, dim, out);
}

inline void store_index_k(const StoreIndexParams& p, const RowRounding* rounding, int64_t begin, int64_t end) {
  for (int64_t token = begin; token < end; ++token) {
    const KeyPlace place = place_of(p, token);
    if (!place.valid) continue;
    *p.pages.scale(place.page, place.offset) = quantize_row(rounding, p.how, p.dtype, p.k, token * p.stride_token,
                                                            p.pages.dim, p.pages.key(place.page, place.offset));
  }
}

// Rows are tokens' heads.
inline void quantize_index_q(const QuantizeQueryParams& p, const RowRounding* rounding, int64_t begin, int64_t end) {
  for (int64_t row = begin; row < end; ++row) {
    const int64_t token = row / p.num_heads, head = row % p.num_heads;
    const float scale = quantize_row(rounding, p.how, p.dtype, p.q, token * p.stride_token + head * p.stride_head,
                                     p.dim, p.q_fp8 + token * p.stride_out_token + head * p.stride_out_head);
    const float weight = element(p.weights_dtype, p.weights, token * p.stride_weights + head) * p.scale;
    p.weights_out[token * p.stride_weights_out + head] = weight * scale;
  }
}

// Rows in their order: mostly of the request of the row before, or of the next one.
inline void expand_rows(const ExpandParams& p) {
  const auto is_of = [&](int64_t row, int64_t request) {
    return request >= 0 && request < p.batch_size && p.cu_seqlens_q[request] <= row &&
           row < p.cu_seqlens_q[request + 1];
  };
  int64_t request = -1;
  for (int64_t row = 0; row < p.num_rows; ++row) {
    if (!is_of(row, request) && !is_of(row, ++request))
      request = attnops::request_of(p.cu_seqlens_q, p.batch_size, row);
    expand_row(p, row, request);
  }
}

// Keys of a page lie side by side, and so do their scales: a request's share of a page is copied at once.
inline void gather_index_k(const GatherIndexParams& p, int64_t begin, int64_t end) {
  const size_t size = static_cast<size_t>(p.pages.dim);
  const bool dense = p.stride_k == p.pages.dim;
  for (int64_t key = begin, count; key < end; key += count) {
    count = 1;
    const int64_t request = attnops::request_of(p.cu_seqlens, p.batch_size, key);
    if (request < 0) continue;
    const int64_t first = p.cu_seqlens[request], last = min_of<int64_t>(end, p.cu_seqlens[request + 1]);
    const KeyPlace place = place_of(p, request, key - first);
    if (!place.valid) {
      std::memset(p.k + key * p.stride_k, 0, size);
      p.k_scale[key] = 0.f;
      continue;
    }
    count = min_of<int64_t>(last - key, p.pages.page_size - place.offset);
    const uint8_t* const keys = p.pages.key(place.page, place.offset);
    for (int64_t i = 0; i < count; i += dense ? count : 1) {
      std::memcpy(p.k + (key + i) * p.stride_k, keys + static_cast<size_t>(i) * size, dense ? count * size : size);
    }
    std::memcpy(p.k_scale + key, p.pages.scale(place.page, place.offset), static_cast<size_t>(count) * sizeof(float));
  }
}

}  // namespace attnops::sparse_indexer::cpu
