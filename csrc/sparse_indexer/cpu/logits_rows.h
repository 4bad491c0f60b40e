#pragma once
#include "cpu/convert.h"
#include "sparse_indexer/logits.h"

// Rows of logits that share keys, and how a call is divided.
namespace attnops::sparse_indexer::cpu {

inline constexpr int64_t kRowsAtOnce = 8, kTaskKeys = 512;

// The keys that a row has logits of: in pages none in front of its first one, of which kernels of a GPU have logits.
inline KeyRange served_keys(const LogitsParams& p, int64_t row) {
  KeyRange range = keys_of(p, row);
  if (!p.ragged && p.row_starts != nullptr) range.begin = range.first_column = max_of(p.row_starts[row], 0);
  return range;
}

// Where a key lies, and its scale. Null, and 0, where the pool has no such page.
inline const uint8_t* find_key(const LogitsParams& p, int64_t request, int64_t key, float& scale) {
  if (p.ragged) {
    scale = p.k_scale[key];
    return p.k + key * p.stride_k;
  }
  const int64_t cell = page_of(key, p.pages.page_size, p.pages.page_shift);
  const int64_t page = page_of_key(p, request, cell, true);
  const int offset = static_cast<int>(key - cell * p.pages.page_size);
  scale = page < 0 ? 0.f : *p.pages.scale(page, offset);
  return page < 0 ? nullptr : p.pages.key(page, offset);
}

inline void store_logit(const LogitsParams& p, int64_t row, const KeyRange& range, int64_t key, float logit) {
  const int64_t at = row * p.stride_row + range.first_column + key - range.begin;
  if (p.bf16) {
    static_cast<uint16_t*>(p.logits)[at] = attnops::cpu::from_float<attnops::cpu::BFloat16>(logit).bits;
  } else {
    static_cast<float*>(p.logits)[at] = logit;
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
  // Calls logits(first row, last row, first key, last key) for a task that has any.
  template <class Logits>
  void run(int64_t task, const Logits& logits) const {
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
    if (begin < end) logits(first, last, begin, end);
  }
};

}  // namespace attnops::sparse_indexer::cpu
