#pragma once
#include "core/math.h"
#include "fmha/params.h"

namespace attnops::fmha::sm90 {

// Bits may depend on the batch then, so only plans that may cut keys have a shape that is chosen by the batch.
inline bool may_have_short_shape(const Params& p) { return p.pieces != nullptr && p.batch_size > 0; }

// Whether all tokens of the call, and all heads of a group, share `rows` rows: so do those of each request.
inline bool has_few_rows(const Params& p, int rows) {
  return max_of(p.num_q_tokens, int64_t{1}) * (p.num_q_heads / p.num_kv_heads) <= rows;
}

// The same of a request in the mean.
inline bool has_few_rows_each(const Params& p, int rows) {
  return p.num_q_tokens * (p.num_q_heads / p.num_kv_heads) <= int64_t{rows} * p.batch_size;
}

// Whether a call has so few products that a CTA's way to its first tile and from its last one binds, by what the host
// knows of it. Ragged requests are taken to be alike in length. The bounds are by measurement: docs/log/fmha_sm90.md.
inline bool is_short(const Params& p, int64_t most_keys = 1024) {
  constexpr double kMostFlops = 2.5e9, kMostFlopsOfNarrow = 0.6e9;  // to head dim 64
  if (!may_have_short_shape(p) || (p.paged && p.page_table.kv_indptr != nullptr)) return false;
  const int64_t keys =
      p.paged ? p.page_table.max_pages * p.page_table.page_size : ceil_div(p.num_k_tokens, int64_t{p.batch_size});
  if (keys > most_keys) return false;
  const bool narrow = max_of(p.head_dim_qk, p.head_dim_v) <= 64;
  const double pairs = static_cast<double>(p.num_q_tokens) * static_cast<double>(keys) / (p.causal ? 2 : 1);
  return 2 * pairs * p.num_q_heads * (p.head_dim_qk + p.head_dim_v) < (narrow ? kMostFlopsOfNarrow : kMostFlops);
}

// Whether works have one tile of keys as a rule, by what the host knows: the mean of ragged lengths, or the width of
// the table. Tables of an engine are wide and tell nothing: then calls of few new tokens are taken to be so. They gain
// up to 1.8x if they are, and lose 5 % at most if they are not. Above head dim 128 they lose more, so the rule is
// narrower.
inline bool has_one_tile(const Params& p, int tile_keys, int head_dim_v) {
  constexpr int64_t kWide = 1024, kFewTokens = 32;
  if (!may_have_short_shape(p)) return false;
  const int64_t batch = p.batch_size;
  if (!p.paged) return p.num_k_tokens <= (head_dim_v > 128 ? tile_keys / 2 : tile_keys) * batch;
  if (p.page_table.kv_indptr == nullptr) {
    const int64_t width = p.page_table.max_pages * int64_t{p.page_table.page_size};
    if (width <= kWide) return width <= tile_keys;
  }
  return head_dim_v <= 128 && p.num_q_tokens <= kFewTokens * batch;
}

// What a shape for short calls would make of a call, beside the instantiation's own shape.
struct ShortShape {
  int rows, keys;                          // of a tile
  bool lone;                               // a CTA has an SM alone
  bool one_tile;                           // the form for works of one tile would serve the call
  int box_keys;                            // 0: keys are gathered
  int works_per_tile, blocks, own_blocks;  // blocks of heads of a group, which each bring all keys
  int own_keys;  // of the own shape's tile, where its plain kernels serve calls of more keys than that better
};

// Whether it is faster: by measurement, docs/log/fmha_sm90.md.
inline bool suits_short(const Params& p, const ShortShape& shape) {
  constexpr int kFewWorks = 132, kMostWorks = 264, kMostKeys = 256, kLargeBox = 32;
  const int64_t tiles = min_of(int64_t{p.num_tiles}, p.num_q_tokens / p.tile_q + p.batch_size);
  if (!is_short(p)) return false;
  if (shape.lone) {
    if (p.kv_dtype != p.dtype || !is_short(p, 512)) return false;
    // All works run at once, or have few rows and a tile of keys.
    return tiles * shape.works_per_tile <= kFewWorks || (shape.one_tile && has_few_rows_each(p, shape.rows / 2));
  }
  if (has_few_rows(p, shape.rows)) return true;  // a tile has all heads of a group
  const bool few_works = int64_t{p.num_tiles} * shape.works_per_tile <= kFewWorks;
  if (shape.box_keys == 0) {
    // Fewer heads that share a tile mean that keys are read oftener. That is the time of rows, unless they are few.
    return shape.blocks <= shape.own_blocks || (few_works && p.kv_dtype != p.dtype && is_short(p, shape.keys));
  }
  if (shape.blocks > 2 * shape.own_blocks && !few_works) return false;
  if (shape.one_tile || is_short(p, shape.own_keys)) return true;
  // Works of several tiles wait for each tile. They gain where all run at once, or most of the own shape's rows would
  // be empty.
  if (shape.box_keys < kLargeBox) return false;
  return has_few_rows_each(p, shape.rows / 2) || (is_short(p, kMostKeys) && tiles * shape.works_per_tile <= kMostWorks);
}

}  // namespace attnops::fmha::sm90
