#pragma once
#include <cstdint>
#include <cstring>

#include "cpu/linear_step.h"

// Rows of a state with vectors of the compiler's, as wide as the registers of the file's instruction set: of wider ones
// it makes detours through memory. All is internal, so that no function compiled for one processor can be taken for
// another's.
// No function that takes or returns these vectors is called from outside, so their passing is nobody else's affair.
#pragma GCC diagnostic ignored "-Wpsabi"

namespace attnops::cpu {
namespace {

#if defined(__AVX512F__)
constexpr int kLanes = 16;
#else
constexpr int kLanes = 8;
#endif
static_assert(kStepLanes % kLanes == 0);

typedef float Floats __attribute__((vector_size(4 * kLanes)));
typedef float Eight __attribute__((vector_size(32)));
typedef float Four __attribute__((vector_size(16)));
typedef uint32_t Words __attribute__((vector_size(4 * kLanes)));
typedef uint16_t Halfwords __attribute__((vector_size(2 * kLanes)));
typedef _Float16 Halves __attribute__((vector_size(2 * kLanes)));

template <DType kDType>
Floats load_lanes(const void* row, int i) {
  if constexpr (kDType == DType::kFloat32) {
    Floats x;
    std::memcpy(&x, static_cast<const float*>(row) + i, sizeof x);
    return x;
  } else if constexpr (kDType == DType::kBFloat16) {
    Halfwords bits;
    std::memcpy(&bits, static_cast<const uint16_t*>(row) + i, sizeof bits);
    return (Floats)(__builtin_convertvector(bits, Words) << 16);
  } else {
    Halves halves;
    std::memcpy(&halves, static_cast<const uint16_t*>(row) + i, sizeof halves);
    return __builtin_convertvector(halves, Floats);
  }
}

// Rounds to nearest even; a NaN stays one.
template <DType kDType>
void store_lanes(void* row, int i, Floats x) {
  if constexpr (kDType == DType::kFloat32) {
    std::memcpy(static_cast<float*>(row) + i, &x, sizeof x);
  } else if constexpr (kDType == DType::kBFloat16) {
    const Words bits = (Words)x;
    const Words rounded = (bits + 0x7FFFu + ((bits >> 16) & 1u)) >> 16;
    const Words is_nan = (Words)((bits & 0x7FFFFFFFu) > 0x7F800000u);
    const Halfwords out = __builtin_convertvector((is_nan & ((bits >> 16) | 0x40u)) | (~is_nan & rounded), Halfwords);
    std::memcpy(static_cast<uint16_t*>(row) + i, &out, sizeof out);
  } else {
    const Halves out = __builtin_convertvector(x, Halves);
    std::memcpy(static_cast<uint16_t*>(row) + i, &out, sizeof out);
  }
}

// By halves: a chain of additions would take longer than the products.
inline float sum_lanes(Floats x) {
#if defined(__AVX512F__)
  const Eight half = __builtin_shufflevector(x, x, 0, 1, 2, 3, 4, 5, 6, 7) +
                     __builtin_shufflevector(x, x, 8, 9, 10, 11, 12, 13, 14, 15);
#else
  const Eight half = x;
#endif
  const Four four = __builtin_shufflevector(half, half, 0, 1, 2, 3) + __builtin_shufflevector(half, half, 4, 5, 6, 7);
  return (four[0] + four[2]) + (four[1] + four[3]);
}

inline Floats part(const float* x, int i) {
  Floats lanes;
  std::memcpy(&lanes, x + i * kLanes, sizeof lanes);
  return lanes;
}

inline Floats splat(float x) { return x - Floats{}; }

// kRows rows from v on, of whole vectors: they share what is read of the key and the query. The state is read twice,
// the second time from the first cache, so that only sums take registers.
template <DType kDType, int kRows>
void step_whole_rows(const HeadStep& h, int vectors, int v) {
  constexpr int kSize = kDType == DType::kFloat32 ? 4 : 2;
  const float *keys = h.key, *queries = h.query, *decays = h.decay;  // stores to a state might change `h`
  const unsigned char* from[kRows];
  unsigned char* to[kRows];
  for (int r = 0; r < kRows; ++r) {
    const int64_t at = (v + r) * h.stride_row * kSize;
    from[r] = static_cast<const unsigned char*>(h.from) + at;
    to[r] = h.to == nullptr ? nullptr : static_cast<unsigned char*>(h.to) + at;
  }
  Floats by_key[kRows] = {}, by_query[kRows] = {};
  for (int i = 0; i < vectors; ++i) {
    const Floats key = part(keys, i), query = part(queries, i), decay = part(decays, i);
    for (int r = 0; r < kRows; ++r) {
      const Floats decayed = load_lanes<kDType>(from[r], i * kLanes) * decay;
      by_key[r] += decayed * key;
      by_query[r] += decayed * query;
    }
  }
  Floats updates[kRows];
  for (int r = 0; r < kRows; ++r) {
    const float update = h.coefficient * (h.value[v + r] - (h.delta ? sum_lanes(by_key[r]) : 0.f));
    h.out[v + r] = sum_lanes(by_query[r]) + update * h.key_query;
    if (h.update != nullptr) h.update[v + r] = update;
    updates[r] = splat(update);
  }
  if (to[0] == nullptr) return;
  for (int i = 0; i < vectors; ++i) {
    const Floats key = part(keys, i), decay = part(decays, i);
    for (int r = 0; r < kRows; ++r) {
      const Floats decayed = load_lanes<kDType>(from[r], i * kLanes) * decay;
      store_lanes<kDType>(to[r], i * kLanes, decayed + updates[r] * key);
    }
  }
}

template <DType kDType>
void step_whole_head(const HeadStep& h) {
  constexpr int kRows = 4;
  const int vectors = h.key_dim / kLanes;
  int v = 0;
  for (; v + kRows <= h.value_dim; v += kRows) step_whole_rows<kDType, kRows>(h, vectors, v);
  for (; v < h.value_dim; ++v) step_whole_rows<kDType, 1>(h, vectors, v);
}

template <DType kDType>
void step_rows_of(const HeadStep& h) {
  constexpr int kSize = kDType == DType::kFloat32 ? 4 : 2;
  if (h.key_dim % kLanes == 0) return step_whole_head<kDType>(h);
  const int vectors = (h.key_dim + kLanes - 1) / kLanes;
  // Through a copy of the row, whose last vector may be a part of one.
  alignas(64) unsigned char copy[kMaxStateDim * kSize] = {};
  for (int v = 0; v < h.value_dim; ++v) {
    const auto* from = static_cast<const unsigned char*>(h.from) + v * h.stride_row * kSize;
    std::memcpy(copy, from, static_cast<size_t>(h.key_dim) * kSize);
    Floats by_key{}, by_query{};
    Floats row[kMaxStateDim / kLanes];
    for (int i = 0; i < vectors; ++i) {
      row[i] = load_lanes<kDType>(copy, i * kLanes) * part(h.decay, i);
      by_key += row[i] * part(h.key, i);
      by_query += row[i] * part(h.query, i);
    }
    const float update = h.coefficient * (h.value[v] - (h.delta ? sum_lanes(by_key) : 0.f));
    h.out[v] = sum_lanes(by_query) + update * h.key_query;
    if (h.update != nullptr) h.update[v] = update;
    if (h.to == nullptr) continue;
    auto* to = static_cast<unsigned char*>(h.to) + v * h.stride_row * kSize;
    const Floats updates = splat(update);
    for (int i = 0; i < vectors; ++i) store_lanes<kDType>(copy, i * kLanes, row[i] + updates * part(h.key, i));
    std::memcpy(to, copy, static_cast<size_t>(h.key_dim) * kSize);
  }
}

inline void step_rows_here(const HeadStep& head) {
  if (head.dtype == DType::kFloat32) return step_rows_of<DType::kFloat32>(head);
  if (head.dtype == DType::kBFloat16) return step_rows_of<DType::kBFloat16>(head);
  step_rows_of<DType::kFloat16>(head);
}

}  // namespace
}  // namespace attnops::cpu
