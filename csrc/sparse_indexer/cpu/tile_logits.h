#pragma once
#include <memory>

#include "cpu/tile_ops.h"
#include "sparse_indexer/cpu/logits.h"
#include "sparse_indexer/cpu/logits_rows.h"

// Logits of rows that share keys, by matrix products: the heads of all rows against a step of keys. e4m3 is exact in
// bf16, and its products are in float.
namespace attnops::sparse_indexer::cpu {

using HeadSumsFunction = void (*)(const HeadSums&);

// What a thread needs for a task. `float` is the largest element.
struct alignas(64) TileScratch {
  float q[kRowsAtOnce * kMaxIndexHeads * 128];
  float keys[kSumKeys * 128];
  float dots[kRowsAtOnce * kMaxIndexHeads * kSumKeys];
  float sums[kSumKeys], scales[kSumKeys];
  const void* rows[kRowsAtOnce * kMaxIndexHeads];
};
static_assert(kRowsAtOnce * kMaxIndexHeads >= kSumKeys);

// One per thread, for ever: nothing in it outlives a task.
inline TileScratch& tile_scratch_of_thread() {
  thread_local std::unique_ptr<TileScratch> scratch;
  if (!scratch) scratch.reset(new TileScratch);
  return *scratch;
}

// Rows [first, last), at most kRowsAtOnce of one request, against keys [begin, end).
inline void tile_logits_of(const LogitsParams& p, int64_t first, int64_t last, int64_t begin, int64_t end,
                           const attnops::cpu::TileOps& ops, HeadSumsFunction head_sums) {
  constexpr DType kBytes = DType::kFloat8E4M3;
  TileScratch& s = tile_scratch_of_thread();
  const int64_t request = p.ragged ? 0 : first / p.seqlen_q;
  const int num_dots = static_cast<int>(last - first) * p.num_heads;
  for (int i = 0; i < num_dots; ++i) {
    s.rows[i] = p.q + (first + i / p.num_heads) * p.stride_token + i % p.num_heads * p.stride_head;
  }
  ops.load_rows(s.q, p.dim, s.rows, num_dots, p.dim, p.dim, kBytes, 1.f);
  for (int64_t key = begin; key < end; key += kSumKeys) {
    const int count = static_cast<int>(min_of<int64_t>(kSumKeys, end - key));
    const int padded = round_up(count, attnops::cpu::kKeyMultiple);
    for (int i = 0; i < padded; ++i) s.rows[i] = i < count ? find_key(p, request, key + i, s.scales[i]) : nullptr;
    ops.pack_keys(s.keys, s.rows, padded, p.dim, p.dim, kBytes);
    if (num_dots > 0) ops.gemm(s.dots, kSumKeys, s.q, p.dim, s.keys, p.dim, num_dots, padded, p.dim, false);
    for (int64_t row = first; row < last; ++row) {
      const KeyRange range = served_keys(p, row);
      const int64_t from = max_of<int64_t>(range.begin - key, 0), to = min_of<int64_t>(range.end - key, count);
      if (from >= to) continue;
      head_sums({.dots = s.dots + (row - first) * p.num_heads * kSumKeys,
                 .weights = p.weights + row * p.stride_weights,
                 .heads = p.num_heads,
                 .keys = padded,
                 .sums = s.sums});
      for (int64_t i = from; i < to; ++i) store_logit(p, row, range, key + i, s.scales[i] * s.sums[i]);
    }
  }
}

}  // namespace attnops::sparse_indexer::cpu
