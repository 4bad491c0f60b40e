#pragma once
#include <cmath>
#include <cstring>

#include "core/report.h"
#include "cpu/convert_e5m2.h"
#include "paged_kv/requests.h"

// The definition of right, and the production kernels too: everything here is bound by memory. Each function takes a
// range of requests or tokens, so that the caller splits the work over its threads.
namespace attnops::paged_kv::cpu {

using attnops::cpu::Float8E4M3;
using attnops::cpu::Float8E5M2;
using attnops::cpu::from_float;
using attnops::cpu::to_float;

// Pages of the first `count` cells of a request, whose row of req_to_token is there.
inline void write_pages(const Requests& r, ReportOp op, int request, const RequestWords& words, int tokens, int count,
                        int32_t* cells) {
  const int32_t* row = tokens_of(r, words);
  for (int cell = 0; cell < count; ++cell) {
    const int position = position_of(r, tokens, cell);
    cells[cell] = page_of_slot(r, op, request, position, row[position]);
    if (r.checked) report_order(r, op, request, row, tokens, cell, cells[cell]);
  }
}

inline void build_page_table(const PageTableParams& p, int64_t begin, int64_t end) {
  const Requests& r = p.requests;
  for (int request = static_cast<int>(begin); request < end; ++request) {
    const RequestWords words = words_of(r, request);
    report_request(r, ReportOp::kBuildPageTable, request, words);
    const int tokens = num_tokens(r, words);
    if (tokens == 0) continue;
    write_pages(r, ReportOp::kBuildPageTable, request, words, tokens, num_pages(r, tokens),
                p.page_table + request * p.page_table_stride);
  }
}

// The scan of kv_indptr, for the whole batch.
inline void build_kv_indptr(const KvIndicesParams& p) {
  int64_t total = 0;
  for (int request = 0; request < p.requests.batch_size; ++request) {
    const RequestWords words = words_of(p.requests, request);
    report_request(p.requests, ReportOp::kBuildKvIndices, request, words);
    p.kv_indptr[request] = clamp_to_int32(total);
    const int tokens = num_tokens(p.requests, words);
    total += num_pages(p.requests, tokens);
    if (p.kv_last_page_len != nullptr) p.kv_last_page_len[request] = last_page_len(p.requests, tokens);
  }
  p.kv_indptr[p.requests.batch_size] = clamp_to_int32(total);
}

inline void build_kv_indices(const KvIndicesParams& p, int64_t begin, int64_t end) {
  const Requests& r = p.requests;
  for (int request = static_cast<int>(begin); request < end; ++request) {
    const RequestWords words = words_of(r, request);
    const int tokens = num_tokens(r, words);
    if (tokens == 0) continue;
    const int64_t start = p.kv_indptr[request];
    const int pages =
        static_cast<int>(max_of<int64_t>(min_of<int64_t>(num_pages(r, tokens), p.num_indices - start), 0));
    write_pages(r, ReportOp::kBuildKvIndices, request, words, tokens, pages, p.kv_indices + start);
  }
}

inline void build_cu_seqlens(const CuSeqlensParams& p) {
  int64_t total = 0;
  for (int request = 0; request < p.batch_size; ++request) {
    p.cu_seqlens[request] = clamp_to_int32(total);
    total += max_of(p.seqlens[request], 0);
  }
  p.cu_seqlens[p.batch_size] = clamp_to_int32(total);
}

inline void translate_slots(const TranslateParams& p, int64_t begin, int64_t end) {
  for (int64_t i = begin; i < end; ++i) {
    const int64_t slot = translated(p, i);
    if (p.out_wide) {
      static_cast<int64_t*>(p.out)[i * p.out_stride] = slot;
    } else {
      static_cast<int32_t*>(p.out)[i * p.out_stride] = static_cast<int32_t>(slot);
    }
  }
}

// ---- store_kv

template <typename Float8, typename T>
void quantize_row(uint8_t* out, const T* in, int64_t count, float scale) {
  for (int64_t i = 0; i < count; ++i) out[i] = from_float<Float8>(to_float(in[i]) / scale).bits;
}

inline void copy_rows(const KvStore& s, int num_heads, int element_size, const Place& place, int64_t token) {
  if (s.head_dim == 0) return;  // and no address to copy from
  char* page =
      static_cast<char*>(s.pages) + (place.page * s.stride_page + place.offset * s.stride_page_token) * element_size;
  const char* row = static_cast<const char*>(s.rows) + token * s.stride_token * element_size;
  for (int head = 0; head < num_heads; ++head) {
    std::memcpy(page + head * s.stride_page_head * element_size, row + head * s.stride_head * element_size,
                static_cast<size_t>(s.head_dim) * element_size);
  }
}

template <typename Float8, typename T>
void quantize_rows(const KvStore& s, int num_heads, const Place& place, int64_t token) {
  uint8_t* page = static_cast<uint8_t*>(s.pages) + place.page * s.stride_page + place.offset * s.stride_page_token;
  const T* row = static_cast<const T*>(s.rows) + token * s.stride_token;
  for (int head = 0; head < num_heads; ++head) {
    const float scale = s.scale ? s.scale[head * s.scale_stride] : 1.f;
    quantize_row<Float8>(page + head * s.stride_page_head, row + head * s.stride_head, s.head_dim, scale);
  }
}

// Calls store(token, place) for every token of the range that has a place.
template <class Store>
void for_each_place(const StoreTarget& target, ReportOp op, int64_t begin, int64_t end, const Store& store) {
  for (int64_t token = begin; token < end; ++token) {
    if (target.report != nullptr) report_slot(target, op, token);
    const Place place = place_of(target, token);
    if (place.store) store(token, place);
  }
}

inline void copy_kv(const StoreKvParams& p, int64_t begin, int64_t end) {
  for_each_place(p.target, ReportOp::kStoreKv, begin, end, [&](int64_t token, const Place& place) {
    copy_rows(p.k, p.num_heads, size_of(p.dtype), place, token);
    copy_rows(p.v, p.num_heads, size_of(p.dtype), place, token);
  });
}

template <typename Float8, typename T>
void quantize_kv(const StoreKvParams& p, int64_t begin, int64_t end) {
  for_each_place(p.target, ReportOp::kStoreKv, begin, end, [&](int64_t token, const Place& place) {
    quantize_rows<Float8, T>(p.k, p.num_heads, place, token);
    quantize_rows<Float8, T>(p.v, p.num_heads, place, token);
  });
}

// ---- store_mla_kv

inline void copy_mla(const StoreMlaParams& p, int64_t begin, int64_t end) {
  const int size = size_of(p.dtype);
  for_each_place(p.target, ReportOp::kStoreMlaKv, begin, end, [&](int64_t token, const Place& place) {
    char* out =
        static_cast<char*>(p.kv_pages) + (place.page * p.stride_page + place.offset * p.stride_page_token) * size;
    std::memcpy(out, static_cast<const char*>(p.latent) + token * p.latent_stride * size, kLatentDim * size);
    std::memcpy(out + kLatentDim * size, static_cast<const char*>(p.k_pe) + token * p.k_pe_stride * size,
                kRopeDim * size);
  });
}

template <typename Float8, typename T>
void quantize_mla(const StoreMlaParams& p, int64_t begin, int64_t end) {
  for_each_place(p.target, ReportOp::kStoreMlaKv, begin, end, [&](int64_t token, const Place& place) {
    uint8_t* out = static_cast<uint8_t*>(p.kv_pages) + place.page * p.stride_page + place.offset * p.stride_page_token;
    const float scale = p.kv_scale ? *p.kv_scale : 1.f;
    quantize_row<Float8>(out, static_cast<const T*>(p.latent) + token * p.latent_stride, kLatentDim, scale);
    quantize_row<Float8>(out + kLatentDim, static_cast<const T*>(p.k_pe) + token * p.k_pe_stride, kRopeDim, scale);
  });
}

// The 656-byte row. Fields are copied in, not cast to: a pool may start at any byte.
template <typename T>
void store_fp8_row(uint8_t* out, const T* latent, const T* k_pe) {
  for (int group = 0; group < kLatentDim / kGroupDim; ++group) {
    const T* in = latent + group * kGroupDim;
    float amax = 0.f;
    for (int d = 0; d < kGroupDim; ++d) amax = fmaxf(amax, fabsf(to_float(in[d])));
    const float scale = group_scale(amax);
    quantize_row<Float8E4M3>(out + group * kGroupDim, in, kGroupDim, scale);
    std::memcpy(out + kLatentDim + group * sizeof(float), &scale, sizeof(float));
  }
  attnops::cpu::BFloat16 rope[kRopeDim];
  for (int d = 0; d < kRopeDim; ++d) rope[d] = from_float<attnops::cpu::BFloat16>(to_float(k_pe[d]));
  std::memcpy(out + kFp8RowBytes - sizeof(rope), rope, sizeof(rope));
}

template <typename T>
void store_fp8_rows(const StoreMlaParams& p, int64_t begin, int64_t end) {
  for_each_place(p.target, ReportOp::kStoreMlaKv, begin, end, [&](int64_t token, const Place& place) {
    store_fp8_row(static_cast<uint8_t*>(p.kv_pages) + place.page * p.stride_page + place.offset * p.stride_page_token,
                  static_cast<const T*>(p.latent) + token * p.latent_stride,
                  static_cast<const T*>(p.k_pe) + token * p.k_pe_stride);
  });
}

}  // namespace attnops::paged_kv::cpu
