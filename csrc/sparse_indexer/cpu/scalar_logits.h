#pragma once
#include <algorithm>
#include <vector>

#include "sparse_indexer/cpu/logits_rows.h"

// The definition of right: products of floats.
namespace attnops::sparse_indexer::cpu {

inline constexpr int kKeysAtOnce = 8;

inline void to_floats(const uint8_t* e4m3, int count, float* out) {
  for (int i = 0; i < count; ++i) out[i] = attnops::cpu::to_float(attnops::cpu::Float8E4M3{e4m3[i]});
}

// A token's queries and weights, heads side by side and padded by zeros.
class TokenQueries {
 public:
  TokenQueries(const LogitsParams& p, int64_t row)
      : heads_(round_up(p.num_heads, 16)),
        q_(static_cast<size_t>(heads_ * p.dim)),
        weights_(static_cast<size_t>(heads_)) {
    std::vector<float> one(static_cast<size_t>(p.dim));
    for (int head = 0; head < p.num_heads; ++head) {
      to_floats(p.q + row * p.stride_token + head * p.stride_head, p.dim, one.data());
      for (int d = 0; d < p.dim; ++d) q_[static_cast<size_t>(d * heads_ + head)] = one[static_cast<size_t>(d)];
      weights_[static_cast<size_t>(head)] = p.weights[row * p.stride_weights + head];
    }
  }

  // sums [kKeysAtOnce]: of weight * max(q . k, 0), of keys [kKeysAtOnce, dim].
  void multiply(int dim, const float* keys, float* sums) const {
    constexpr int kWide = 16;
    for (int i = 0; i < kKeysAtOnce; ++i) sums[i] = 0.f;
    for (int first = 0; first < heads_; first += kWide) {
      float dots[kKeysAtOnce][kWide] = {};
      for (int d = 0; d < dim; ++d) {
        const float* const q = q_.data() + d * heads_ + first;
        for (int i = 0; i < kKeysAtOnce; ++i) {
          const float key = keys[i * dim + d];
          for (int h = 0; h < kWide; ++h) dots[i][h] += key * q[h];
        }
      }
      const float* const weights = weights_.data() + first;
      for (int i = 0; i < kKeysAtOnce; ++i) {
        for (int h = 0; h < kWide; ++h) sums[i] += weights[h] * (dots[i][h] < 0.f ? 0.f : dots[i][h]);  // a NaN stays
      }
    }
  }

 private:
  int heads_;
  std::vector<float> q_, weights_;
};

// Rows [first, last), at most kRowsAtOnce of one request, against keys [begin, end).
inline void scalar_logits_of(const LogitsParams& p, int64_t first, int64_t last, int64_t begin, int64_t end) {
  const int64_t request = p.ragged ? 0 : first / p.seqlen_q;
  std::vector<TokenQueries> queries;
  for (int64_t row = first; row < last; ++row) queries.emplace_back(p, row);
  float keys[kKeysAtOnce * 128] = {}, scales[kKeysAtOnce], sums[kKeysAtOnce];
  for (int64_t key = begin; key < end; key += kKeysAtOnce) {
    const int count = static_cast<int>(min_of<int64_t>(kKeysAtOnce, end - key));
    for (int i = 0; i < count; ++i) {
      const uint8_t* const at = find_key(p, request, key + i, scales[i]);
      if (at != nullptr) to_floats(at, p.dim, keys + i * p.dim);
      if (at == nullptr) std::fill_n(keys + i * p.dim, p.dim, 0.f);
    }
    for (int64_t row = first; row < last; ++row) {
      const KeyRange range = served_keys(p, row);
      if (range.end <= key || range.begin >= key + count) continue;
      queries[static_cast<size_t>(row - first)].multiply(p.dim, keys, sums);
      for (int i = 0; i < count; ++i) {
        if (key + i >= range.begin && key + i < range.end) store_logit(p, row, range, key + i, scales[i] * sums[i]);
      }
    }
  }
}

}  // namespace attnops::sparse_indexer::cpu
