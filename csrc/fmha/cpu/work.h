#pragma once
#include <cstdint>

#include "core/math.h"
#include "core/report.h"
#include "core/tree_window.h"
#include "cpu/tile_ops.h"
#include "fmha/params.h"

// Which rows meet which keys and where both lie: what the reference and the tiled kernel share. Portable code only.
namespace attnops::fmha::cpu {

inline constexpr int kMaxRows = 256;  // rows (token, head of the group) that one work item carries over the keys

struct Request {
  int index;
  int64_t first_q_token, first_k_token;
  int seqlen_q, seqlen_k;
};

inline ReportOp report_op(const Params& p) { return p.paged ? ReportOp::kFmhaPaged : ReportOp::kFmhaVarlen; }

inline Request request_of(const Params& p, int index) {
  Request r{index, p.cu_seqlens_q[index], 0, p.cu_seqlens_q[index + 1] - p.cu_seqlens_q[index], 0};
  if (p.paged) {
    r.seqlen_k = min_of(max_of(p.cache_seqlens[index], 0), p.page_table.num_tokens(index));
  } else {
    r.first_k_token = p.cu_seqlens_k[index];
    r.seqlen_k = p.cu_seqlens_k[index + 1] - p.cu_seqlens_k[index];
  }
  return r;
}

// Query rows [first_row, first_row + num_rows) of a tile for one KV head: row r is token r / group of the tile and head
// r % group of the KV head's group. Token-major, so that a run of rows sees nearly the same keys.
struct Work {
  Request request;
  int first_token, num_tokens;  // of the tile, within the request
  int kv_head, group;
  int first_row, num_rows;

  int token(int row) const { return first_token + (first_row + row) / group; }  // within the request
  int q_head(int row) const { return kv_head * group + (first_row + row) % group; }
};

inline int chunks_per_tile(const Params& p) { return ceil_div(p.tile_q * (p.num_q_heads / p.num_kv_heads), kMaxRows); }

inline int64_t num_items(const Params& p) {
  return static_cast<int64_t>(p.num_tiles) * p.num_kv_heads * chunks_per_tile(p);
}

// Item i of the call, in the order of the plan; false when there is nothing to do for it.
inline bool work_of(const Params& p, int64_t item, Work& work) {
  const int chunks = chunks_per_tile(p);
  const int chunk = static_cast<int>(item % chunks);
  const int64_t tile_row = item / chunks / p.num_kv_heads;
  const int request = p.tile_order[2 * tile_row], tile = p.tile_order[2 * tile_row + 1];
  if (request < 0) return false;
  work.request = request_of(p, request);
  work.first_token = tile * p.tile_q;
  work.num_tokens = min_of(p.tile_q, work.request.seqlen_q - work.first_token);
  work.kv_head = static_cast<int>(item / chunks % p.num_kv_heads);
  work.group = p.num_q_heads / p.num_kv_heads;
  work.first_row = chunk * kMaxRows;
  work.num_rows = min_of(kMaxRows, work.num_tokens * work.group - work.first_row);
  return work.num_rows > 0;
}

// Keys [begin, end) that position and length leave to query token `token`; both ends grow with it. A tree mask then
// takes keys away, and a window beside it begins elsewhere (keys_of).
struct KeyRange {
  int begin, end;
};

inline KeyRange keys_by_row(const Params& p, const Request& r, int token) {
  const int64_t position = static_cast<int64_t>(r.seqlen_k) - r.seqlen_q + token;
  int64_t begin = 0, end = r.seqlen_k;
  if (p.window_left >= 0) begin = max_of<int64_t>(position - p.window_left, 0);
  if (p.causal && !p.tree_mask) end = min_of<int64_t>(end, position + 1);
  if (p.window_right >= 0) end = min_of<int64_t>(end, position + p.window_right + 1);
  begin = min_of<int64_t>(begin, r.seqlen_k);
  return {static_cast<int>(begin), static_cast<int>(max_of(end, begin))};
}

// What a tree mask holds of a query token.
inline const uint8_t* tree_row(const Params& p, const Request& r, int token) {
  return p.tree_mask + (r.first_q_token + token) * p.tree_mask_stride_token;
}

// keys_by_row, with windows that count steps of a tree.
inline KeyRange keys_of(const Params& p, const Request& r, int token) {
  KeyRange keys = keys_by_row(p, r, token);
  if (!p.tree_mask || p.window_left < 0) return keys;
  const int64_t drafts = min_of<int64_t>(r.seqlen_q, 8 * p.tree_mask_bytes);
  const int64_t prefix = static_cast<int64_t>(r.seqlen_k) - r.seqlen_q;
  const int64_t begin = tree_window_begin(tree_row(p, r, token), drafts, prefix, p.window_left);
  keys.begin = static_cast<int>(min_of<int64_t>(max_of<int64_t>(begin, 0), r.seqlen_k));
  keys.end = max_of(keys.end, keys.begin);
  return keys;
}

// Bounds of keys_of tokens [first, last] of the request: the lowest ends of any, and the highest. In a tree each may
// have any depth.
struct KeyBounds {
  KeyRange low, high;
};

inline KeyBounds key_bounds(const Params& p, const Request& r, int first, int last) {
  KeyBounds bounds{keys_by_row(p, r, first), keys_by_row(p, r, last)};
  if (p.tree_mask) {
    bounds.low.begin = keys_by_row(p, r, 0).begin;
    bounds.high.begin = keys_by_row(p, r, r.seqlen_q - 1).begin;
  }
  return bounds;
}

// Whether a tree mask leaves `key` to query token `token` of the request.
inline bool tree_allows(const Params& p, const Request& r, int token, int key) {
  const int64_t draft = static_cast<int64_t>(key) - (static_cast<int64_t>(r.seqlen_k) - r.seqlen_q);
  if (draft < 0) return true;
  if (draft / 8 >= p.tree_mask_bytes) return false;
  return (tree_row(p, r, token)[draft / 8] >> (draft % 8)) & 1;
}

// Keys [begin, end) that query token `token` of the request does not see, whatever else it may.
inline KeyRange hidden_from(const Params& p, const Request& r, int token) {
  if (!p.hidden_keys) return {INT32_MAX, INT32_MAX};
  const int32_t* keys = p.hidden_keys + 2 * (r.first_q_token + token);
  return {keys[0], keys[1]};
}

// Addresses of keys [begin, end) of a request for one KV head, into k_rows[0 ..] and v_rows[0 ..]. Only keys that some
// row may see are asked for, so no cell of the table and no page is touched that could be stale. Null: the key's page
// is outside the pool, which was recorded; returns whether one is.
bool gather_rows(const Params& p, const Request& r, int kv_head, int begin, int end, const void** k_rows,
                 const void** v_rows);

inline const void* query_row(const Params& p, const Work& w, int row) {
  const int64_t offset = (w.request.first_q_token + w.token(row)) * p.q_stride_token + w.q_head(row) * p.q_stride_head;
  return static_cast<const char*>(p.q) + offset * size_of(p.dtype);
}

inline void* out_row(const Params& p, const Work& w, int row) {
  const int64_t offset =
      (w.request.first_q_token + w.token(row)) * p.out_stride_token + w.q_head(row) * p.out_stride_head;
  return static_cast<char*>(p.out) + offset * size_of(p.dtype);
}

inline float scale_of(const float* scale, int stride, int kv_head) {
  return scale ? scale[static_cast<int64_t>(kv_head) * stride] : 1.f;
}

// Writes the lse of a row and returns what its accumulated values are multiplied by: one over the sum, the values'
// scale, and the share that a sink leaves. `sum` is over exp(score - largest); 0: no visible key.
float finish_row(const Params& p, const Work& w, int row, float largest, float sum);

}  // namespace attnops::fmha::cpu
