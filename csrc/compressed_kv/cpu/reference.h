#pragma once
#include <cstring>

#include "compressed_kv/cpu/entry_values.h"
#include "compressed_kv/entries.h"
#include "cpu/convert.h"
#include "cpu/row_rounding.h"

// All but the values of entries, which have a form per instruction set. Each function takes a range, so that the caller
// splits the work over its threads.
namespace attnops::compressed_kv::cpu {

using attnops::cpu::BFloat16;
using attnops::cpu::Float16;
using attnops::cpu::from_float;
using attnops::cpu::to_float;

inline void plan(const PlanParams& p) {
  int64_t sum = 0;
  p.entry_indptr[0] = 0;
  for (int64_t request = 0; request < p.batch_size; ++request) {
    sum += entries_of({p.cu_seqlens_q, p.cache_seqlens, request, INT32_MAX}, p.ratio);
    p.entry_indptr[request + 1] = static_cast<int32_t>(sum);
  }
}

// What an entry is made with.
struct Tools {
  EntryValues values;
  const attnops::cpu::RowRounding* rounding;
};

// The tokens of an entry, oldest first.
struct EntryTokens {
  const void* values[2 * kMaxRatio];
  const float* ape[2 * kMaxRatio];

  int find(const Params& p, const Entry& entry) {
    const NewTokens tokens = new_tokens(p, entry.request);
    int count = 0;
    for (int64_t back = p.reach(); back > 0; --back) {
      const int64_t position = (entry.index + 1) * p.ratio - back;
      if (position < 0) continue;  // there is no group before the first
      const int part = p.overlap && back <= p.ratio ? p.dim : 0;
      values[count] = token_row(p, entry.request, tokens, position) + int64_t{part} * size_of(p.dtype);
      ape[count++] = p.ape + position % p.ratio * p.width() + part;
    }
    return count;
  }
};

inline void rotate(const Params& p, int64_t position, float* x) {
  const float* cosine = p.cos_sin + position * kRopeDim;
  const float* sine = cosine + kRopeDim / 2;
  float* rope = x + p.dim - kRopeDim;
  for (int i = 0; i < kRopeDim / 2; ++i) {
    float& a = rope[p.interleaved ? 2 * i : i];
    float& b = rope[p.interleaved ? 2 * i + 1 : i + kRopeDim / 2];
    const float turned = a * cosine[i] - b * sine[i];
    b = b * cosine[i] + a * sine[i];
    a = turned;
  }
}

template <typename T>
void store_values(const Params& p, const float* x, uint8_t* row) {
  for (int c = 0; c < p.dim; ++c) reinterpret_cast<T*>(row)[c] = from_float<T>(x[c]);
}

inline void store_shared(const Params& p, const Tools& tools, const Place& place, const float* x) {
  uint8_t* const page = p.pages + place.page * p.stride_page;
  uint8_t* const row = page + int64_t{place.offset} * kSharedRowDataBytes;
  uint8_t* const scales =
      page + int64_t{p.page_size} * kSharedRowDataBytes + int64_t{place.offset} * kSharedRowScaleBytes;
  for (int first = 0; first < kSharedRowNope; first += kSharedRowScaleWidth) {
    float block[kSharedRowScaleWidth];
    std::memcpy(block, x + first, sizeof block);
    const float scale =
        attnops::cpu::quantize_key(tools.rounding, {false, true}, block, kSharedRowScaleWidth, row + first);
    scales[first / kSharedRowScaleWidth] = static_cast<uint8_t>(bits_of(scale) >> 23);
  }
  for (int c = 0; c < kSharedRowRope; ++c) {
    const BFloat16 value = from_float<BFloat16>(x[kSharedRowNope + c]);
    std::memcpy(row + kSharedRowNope + 2 * c, &value, sizeof value);
  }
}

inline void store(const Params& p, const Tools& tools, const Place& place, float* x) {
  if (p.kind == RowKind::kShared) return store_shared(p, tools, place, x);
  uint8_t* const page = p.pages + place.page * p.stride_page;
  if (p.kind == RowKind::kIndex) {
    const float scale =
        attnops::cpu::quantize_key(tools.rounding, p.how, x, p.dim, page + int64_t{place.offset} * p.dim);
    std::memcpy(page + int64_t{p.page_size} * p.dim + int64_t{place.offset} * 4, &scale, sizeof scale);
    return;
  }
  uint8_t* const row = page + place.offset * p.stride_row;
  if (p.row_dtype == DType::kFloat32) return store_values<float>(p, x, row);
  if (p.row_dtype == DType::kFloat16) return store_values<Float16>(p, x, row);
  store_values<BFloat16>(p, x, row);
}

inline void compress(const Params& p, const Tools& tools, int64_t begin, int64_t end) {
  EntryTokens tokens;
  for (int64_t number = begin; number < end; ++number) {
    const Entry entry = entry_of(p, number);
    if (entry.request < 0 || !has_rotation(p, entry, p.report)) continue;
    const Place place = place_of(p, entry, p.report);
    if (!place.valid) continue;
    float x[kMaxDim];
    const int count = tokens.find(p, entry);
    tools.values({.dim = p.dim,
                  .count = count,
                  .dtype = p.dtype,
                  .to_scores = p.width(),
                  .values = tokens.values,
                  .ape = tokens.ape,
                  .norm_weight = p.norm_weight,
                  .eps = p.eps},
                 x);
    rotate(p, entry.index * p.ratio, x);
    store(p, tools, place, x);
  }
}

// The newest tokens of a request into its state, once every entry has read what stood there.
inline void keep(const Params& p, int64_t begin, int64_t end) {
  const int64_t row = 2 * p.width(), size = size_of(p.dtype);
  for (int64_t request = begin; request < end; ++request) {
    if (!in_pool(p, request)) continue;
    const NewTokens tokens = new_tokens(p, request);
    for (int64_t t = max_of<int64_t>(tokens.count - p.state_tokens, 0); t < tokens.count; ++t) {
      const int64_t to = p.state_indices[request] * p.stride_slot + (tokens.start + t) % p.state_tokens * row;
      std::memcpy(static_cast<char*>(p.state) + to * size,
                  static_cast<const char*>(p.kv_score) + (tokens.first + t) * p.stride_token * size,
                  static_cast<size_t>(row * size));
    }
  }
}

}  // namespace attnops::compressed_kv::cpu
