#pragma once
#include <vector>

#include "cpu/convert.h"
#include "sparse_indexer/cpu/logits.h"
#include "sparse_indexer/logits.h"

// Logits of rows that share keys: the keys become floats once for all of them.
namespace attnops::sparse_indexer::cpu {

using ProductsFunction = void (*)(const HeadProducts&);

inline constexpr int64_t kRowsAtOnce = 8, kTaskKeys = 512;

// The keys that a row has logits of: in pages none in front of its first one, of which kernels of a GPU have logits.
inline KeyRange served_keys(const LogitsParams& p, int64_t row) {
  KeyRange range = keys_of(p, row);
  if (!p.ragged && p.row_starts != nullptr) range.begin = range.first_column = max_of(p.row_starts[row], 0);
  return range;
}

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
  HeadProducts products(const LogitsParams& p, const float* keys, float* sums) const {
    return {.q = q_.data(), .weights = weights_.data(), .heads = heads_, .dim = p.dim, .keys = keys, .sums = sums};
  }

 private:
  int heads_;
  std::vector<float> q_, weights_;
};

// One key as floats; returns its scale. Zeros where the pool has no such page.
inline float load_key(const LogitsParams& p, int64_t request, int64_t key, float* out) {
  if (p.ragged) {
    to_floats(p.k + key * p.stride_k, p.dim, out);
    return p.k_scale[key];
  }
  const int64_t cell = page_of(key, p.pages.page_size, p.pages.page_shift);
  const int64_t page = page_of_key(p, request, cell, true);
  if (page < 0) {
    for (int d = 0; d < p.dim; ++d) out[d] = 0.f;
    return 0.f;
  }
  const int offset = static_cast<int>(key - cell * p.pages.page_size);
  to_floats(p.pages.key(page, offset), p.dim, out);
  return *p.pages.scale(page, offset);
}

inline void store_logit(const LogitsParams& p, int64_t row, const KeyRange& range, int64_t key, float logit) {
  const int64_t at = row * p.stride_row + range.first_column + key - range.begin;
  if (p.bf16) {
    static_cast<uint16_t*>(p.logits)[at] = attnops::cpu::from_float<attnops::cpu::BFloat16>(logit).bits;
  } else {
    static_cast<float*>(p.logits)[at] = logit;
  }
}

// Rows [first, last), at most kRowsAtOnce of one request, against keys [begin, end).
inline void logits_of(const LogitsParams& p, int64_t first, int64_t last, int64_t begin, int64_t end,
                      ProductsFunction products) {
  const int64_t request = p.ragged ? 0 : first / p.seqlen_q;
  std::vector<TokenQueries> queries;
  for (int64_t row = first; row < last; ++row) queries.emplace_back(p, row);
  float keys[kKeysAtOnce * 128] = {}, scales[kKeysAtOnce], sums[kKeysAtOnce];
  for (int64_t key = begin; key < end; key += kKeysAtOnce) {
    const int count = static_cast<int>(min_of<int64_t>(kKeysAtOnce, end - key));
    for (int i = 0; i < count; ++i) scales[i] = load_key(p, request, key + i, keys + i * p.dim);
    for (int64_t row = first; row < last; ++row) {
      const KeyRange range = served_keys(p, row);
      if (range.end <= key || range.begin >= key + count) continue;
      products(queries[static_cast<size_t>(row - first)].products(p, keys, sums));
      for (int i = 0; i < count; ++i) {
        if (key + i >= range.begin && key + i < range.end) store_logit(p, row, range, key + i, scales[i] * sums[i]);
      }
    }
  }
}

// Tasks of a call: groups of rows, and pieces of the keys that the longest row may have.
struct LogitsTasks {
  const LogitsParams& p;
  int64_t together, groups_together, groups, most_keys = 0;

  explicit LogitsTasks(const LogitsParams& params) : p(params) {
    together = p.ragged ? p.num_rows : p.seqlen_q;
    groups_together = ceil_div(together, kRowsAtOnce);
    groups = together == 0 ? 0 : p.num_rows / together * groups_together;
    for (int64_t row = 0; row < p.num_rows; ++row) {
      const KeyRange range = served_keys(p, row);
      if (range.end > range.begin) most_keys = max_of(most_keys, range.end);
    }
  }
  int64_t pieces() const { return ceil_div(most_keys, kTaskKeys); }
  void run(int64_t task, ProductsFunction products) const {
    const int64_t group = task / pieces(), piece = task % pieces();
    const int64_t base = group / groups_together * together, from = group % groups_together * kRowsAtOnce;
    const int64_t first = base + from, last = base + min_of(from + kRowsAtOnce, together);
    int64_t begin = INT64_MAX, end = 0;
    for (int64_t row = first; row < last; ++row) {
      const KeyRange range = served_keys(p, row);
      if (range.end <= range.begin) continue;
      begin = min_of(begin, range.begin);
      end = max_of(end, range.end);
    }
    begin = max_of(begin, piece * kTaskKeys);
    end = min_of(end, (piece + 1) * kTaskKeys);
    if (begin < end) logits_of(p, first, last, begin, end, products);
  }
};

}  // namespace attnops::sparse_indexer::cpu
