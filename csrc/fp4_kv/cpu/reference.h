#pragma once
#include <algorithm>
#include <cmath>
#include <vector>

#include "cpu/convert.h"
#include "fp4_kv/params.h"
#include "scheduler/split_kv.h"

// The definition of right, in plain loops.
namespace attnops::fp4_kv::cpu {

using attnops::cpu::Float8E4M3;
using attnops::cpu::from_float;
using attnops::cpu::to_float;

// The nearest code, ties to the even one; beyond 6 saturates.
inline uint8_t code_of(float x) {
  const float size = std::fabs(x);
  const int code = size <= 0.25f   ? 0
                   : size < 0.75f  ? 1
                   : size <= 1.25f ? 2
                   : size < 1.75f  ? 3
                   : size <= 2.5f  ? 4
                   : size < 3.5f   ? 5
                   : size <= 5.f   ? 6
                                   : 7;
  return static_cast<uint8_t>(code | (std::signbit(x) ? 8 : 0));
}

inline float value_of(int code) {
  constexpr float kValues[] = {0.f, 0.5f, 1.f, 1.5f, 2.f, 3.f, 4.f, 6.f};
  return code & 8 ? -kValues[code & 7] : kValues[code & 7];
}

// 16 values: their scale and codes. A block that holds NaN, which codes cannot, has NaN as its scale.
template <typename T>
void quantize_block(const T* in, float scale_of_tensor, uint8_t* codes, uint8_t* scale) {
  float largest = 0.f;
  bool is_nan = false;
  for (int i = 0; i < kBlock; ++i) {
    const float x = to_float(in[i]);
    is_nan |= std::isnan(x);
    largest = std::fmax(largest, std::fabs(x));
  }
  *scale = is_nan ? 0x7F : from_float<Float8E4M3>(largest / scale_of_tensor / kLargestCode).bits;
  const float real = to_float(Float8E4M3{*scale}) * scale_of_tensor;
  for (int i = 0; i < kBlock; i += 2) {
    const float low = real > 0.f ? to_float(in[i]) / real : 0.f, high = real > 0.f ? to_float(in[i + 1]) / real : 0.f;
    codes[i / 2] = static_cast<uint8_t>(code_of(low) | code_of(high) << 4);
  }
}

template <typename T>
void store_side(const StoreSide& s, int num_heads, int64_t token, int64_t page, int64_t offset) {
  const float scale_of_tensor = s.pages.scale ? *s.pages.scale : 1.f;
  for (int head = 0; head < num_heads; ++head) {
    const T* row = static_cast<const T*>(s.rows) + token * s.stride_token + head * s.stride_head;
    uint8_t* codes = s.pages.codes + page * s.pages.codes_stride_page + offset * s.pages.codes_stride_token +
                     head * s.pages.codes_stride_head;
    uint8_t* scales = s.pages.scales + page * s.pages.scales_stride_page + offset * s.pages.scales_stride_token +
                      head * s.pages.scales_stride_head;
    for (int d = 0; d < s.head_dim; d += kBlock) {
      quantize_block(row + d, scale_of_tensor, codes + d / 2, scales + d / kBlock);
    }
  }
}

template <typename T>
void store(const StoreParams& p, int64_t begin, int64_t end) {
  for (int64_t token = begin; token < end; ++token) {
    const int64_t slot = p.slots[token];
    if (slot >= p.num_slots) {
      record_fault(p.report, {kReportStoreKvFp4, ReportKind::kSlotIndex, token, token, slot, p.num_slots});
      continue;
    }
    if (slot < 0) continue;
    store_side<T>(p.k, p.num_heads, token, slot / p.page_size, slot % p.page_size);
    if (p.v.rows) store_side<T>(p.v, p.num_heads, token, slot / p.page_size, slot % p.page_size);
  }
}

// A head's row as floats.
inline void real_row(const Pages& pages, int64_t page, int64_t offset, int head, int head_dim, float* out) {
  const uint8_t* codes =
      pages.codes + page * pages.codes_stride_page + offset * pages.codes_stride_token + head * pages.codes_stride_head;
  const uint8_t* scales = pages.scales + page * pages.scales_stride_page + offset * pages.scales_stride_token +
                          head * pages.scales_stride_head;
  for (int d = 0; d < head_dim; ++d) {
    out[d] = value_of(codes[d / 2] >> (d % 2 * 4) & 15) * to_float(Float8E4M3{scales[d / kBlock]});
  }
}

// All query rows of a request and KV head.
template <typename T>
void decode_head(const DecodeParams& p, int request, int kv_head) {
  const int group = p.num_q_heads / p.num_kv_heads, rows = p.seqlen_q * group, dim = p.head_dim, dim_v = p.head_dim_v;
  const int length = min_of(length_of(p.cache_seqlens[request]), p.page_table.num_tokens(request));
  const KvRange keys = visible_keys(length, p.seqlen_q, p.window_left);
  const float k_scale = p.k.scale ? *p.k.scale : 1.f;
  const float v_scale = !p.v.codes ? k_scale : p.v.scale ? *p.v.scale : 1.f;
  std::vector<float> q(rows * dim), acc(rows * dim_v, 0.f), top(rows, -INFINITY), sum(rows, 0.f), k(dim), v(dim_v);
  for (int row = 0; row < rows; ++row) {
    const T* from = static_cast<const T*>(p.q) + request * p.q_stride_request + row / group * p.q_stride_token +
                    (kv_head * group + row % group) * p.q_stride_head;
    for (int d = 0; d < dim; ++d) q[row * dim + d] = to_float(from[d]);
  }
  const int32_t* cells = p.page_table.row(request);
  for (int key = keys.begin; key < keys.end; ++key) {
    const int cell = key / p.page_table.page_size, page = cells[cell];
    if (!p.page_table.has_page(page)) {
      const bool first = key == keys.begin || key % p.page_table.page_size == 0;
      if (first && kv_head == 0) {
        record_fault(p.report, {kReportFp4Decode, ReportKind::kPageIndex, request, cell, page, p.page_table.num_pages});
      }
      continue;
    }
    real_row(p.k, page, key % p.page_table.page_size, kv_head, dim, k.data());
    if (p.v.codes) {
      real_row(p.v, page, key % p.page_table.page_size, kv_head, dim_v, v.data());
    } else {
      std::copy_n(k.data(), dim_v, v.data());
    }
    for (int row = 0; row < rows; ++row) {
      const int position = length - p.seqlen_q + row / group;
      if (key > position || (p.window_left >= 0 && key < position - p.window_left)) continue;
      float score = 0.f;
      for (int d = 0; d < dim; ++d) score += q[row * dim + d] * k[d];
      score *= p.softmax_scale * k_scale;
      if (p.logit_cap > 0.f) score = p.logit_cap * std::tanh(score / p.logit_cap);
      if (score == -INFINITY) continue;
      if (score > top[row]) {
        const float shrink = std::exp(top[row] - score);
        for (int d = 0; d < dim_v; ++d) acc[row * dim_v + d] *= shrink;
        sum[row] *= shrink, top[row] = score;
      }
      const float weight = std::isnan(score) ? score : std::exp(score - top[row]);
      for (int d = 0; d < dim_v; ++d) acc[row * dim_v + d] += weight * v[d];
      sum[row] += weight;
    }
  }
  for (int row = 0; row < rows; ++row) {
    const int token = row / group, head = kv_head * group + row % group;
    const bool empty = sum[row] == 0.f;
    const float lse = empty ? -INFINITY : top[row] + std::log(sum[row]);
    if (p.lse) p.lse[(static_cast<int64_t>(request) * p.seqlen_q + token) * p.num_q_heads + head] = lse;
    float factor = empty ? 0.f : v_scale / sum[row];
    if (p.sinks && !empty) factor /= 1.f + std::exp(p.sinks[head] - lse);
    T* out =
        static_cast<T*>(p.out) + request * p.out_stride_request + token * p.out_stride_token + head * p.out_stride_head;
    for (int d = 0; d < dim_v; ++d) out[d] = from_float<T>(empty ? 0.f : acc[row * dim_v + d] * factor);
  }
}

template <typename T>
void decode(const DecodeParams& p, int64_t begin, int64_t end) {
  for (int64_t work = begin; work < end; ++work) {
    decode_head<T>(p, static_cast<int>(work / p.num_kv_heads), static_cast<int>(work % p.num_kv_heads));
  }
}

}  // namespace attnops::fp4_kv::cpu
