#pragma once
#include "core/divisor.h"
#include "core/math.h"
#include "core/report.h"
#include "core/types.h"
#include "fmha/params.h"

namespace attnops::fmha::sm90 {

// What the host derives from Params for a launch.
struct Schedule {
  int num_works;    // num_tiles * chunks * head_blocks
  int head_blocks;  // KV heads times blocks of `pack` heads in a group
  int blocks_per_group;
  int pack;          // query heads of a group in a tile's rows
  int chunks;        // tiles of the CTA in a tile of the plan
  int chunk_tokens;  // query tokens of a CTA's tile
  int box_keys;      // rows of a box of the copy engine; 0: rows are gathered
  int pack_inverse;  // ceil(2^16 / pack): row / pack = row * pack_inverse >> 16 below 2^8 rows
  Divisor page_size;
};

// One tile of query rows and the keys that it sees. Written by the producer, read by all.
struct Work {
  int request;
  int first_token, num_tokens;  // within the request
  int first_q_token;            // of the request, in q
  int seqlen_k;
  int first_k_token;  // of the request, ragged only
  int position;       // of first_token: seqlen_k - seqlen_q + first_token
  int draft;          // position of the request's first new token
  int kv_head, q_head;
  int key_begin, key_end;      // that any row of the tile may see
  int known_begin, known_end;  // tiles within need no care for memory that nobody owns
  int tile_begin, tile_end;    // of keys
};
static_assert(sizeof(Work) <= 64);  // SharedLayout::kWorkBytes

// Keys [begin, end) that position and length leave to the token at `position`. A tree mask then takes keys away.
struct KeyRange {
  int begin, end;
};

__device__ __forceinline__ KeyRange keys_at(const Params& p, int64_t position, int seqlen_k) {
  int64_t begin = 0, end = seqlen_k;
  if (p.window_left >= 0) begin = max_of<int64_t>(position - p.window_left, 0);
  if (p.causal && p.tree_mask == nullptr) end = min_of<int64_t>(end, position + 1);
  if (p.window_right >= 0) end = min_of<int64_t>(end, position + p.window_right + 1);
  begin = min_of<int64_t>(begin, seqlen_k);
  return {static_cast<int>(begin), static_cast<int>(max_of(end, begin))};
}

__device__ __forceinline__ int clamp(int64_t value, int64_t low, int64_t high) {
  return static_cast<int>(value < low ? low : value > high ? high : value);
}

// How many blocks of heads take turns over a request's tiles: as many as have their keys in half of L2. The others
// follow when these are done with all tiles.
__device__ __forceinline__ int heads_at_a_time(const Params& p, const Schedule& s, int64_t seqlen_k) {
  constexpr int64_t kBytes = 24 << 20;
  const int64_t bytes = max_of<int64_t>(seqlen_k, 1) * (p.head_dim_qk + p.head_dim_v) * size_of(p.kv_dtype);
  return static_cast<int>(min_of<int64_t>(max_of<int64_t>(kBytes / bytes, 1) * s.blocks_per_group, s.head_blocks));
}

// Work number `index`: requests in the plan's order, in each the sections of heads, in each the tiles from the last and
// their heads. False: the plan has no such row, and none behind it. What is no tile of its request has no tokens.
template <int kKeys>
__device__ __forceinline__ bool decode_work(const Params& p, const Schedule& s, int index, Work& w) {
  const int per_tile = s.head_blocks * s.chunks, row = index / per_tile;
  const int2 entry = *reinterpret_cast<const int2*>(p.tile_order + 2 * static_cast<int64_t>(row));
  w.num_tokens = 0;
  if (entry.x < 0) return false;
  if (entry.x >= p.batch_size) return true;
  w.request = entry.x;
  const int first = p.cu_seqlens_q[w.request], end = p.cu_seqlens_q[w.request + 1];
  w.first_q_token = clamp(first, 0, p.num_q_tokens);
  const int seqlen_q = clamp(static_cast<int64_t>(end) - w.first_q_token, 0, p.num_q_tokens - w.first_q_token);
  int64_t seqlen_k;
  if (p.paged) {
    seqlen_k = p.cache_seqlens[w.request];
    w.first_k_token = 0;
    const int64_t room = p.page_table.num_tokens(w.request);
    if (seqlen_k > room && p.report != nullptr) {
      record_fault(p.report, {ReportOp::kFmhaPaged, ReportKind::kLength, w.request, 0, seqlen_k, room + 1});
    }
    seqlen_k = min_of(seqlen_k, room);
  } else {
    w.first_k_token = clamp(p.cu_seqlens_k[w.request], 0, p.num_k_tokens);
    seqlen_k = clamp(static_cast<int64_t>(p.cu_seqlens_k[w.request + 1]) - w.first_k_token, 0,
                     p.num_k_tokens - w.first_k_token);
  }
  w.seqlen_k = clamp(seqlen_k, 0, INT32_MAX - 2 * kKeys);

  const int num_tiles = ceil_div(seqlen_q, p.tile_q);
  const int first_row = row - (num_tiles - 1 - entry.y);
  if (entry.y < 0 || entry.y >= num_tiles || first_row < 0) return true;
  const int section_heads = heads_at_a_time(p, s, w.seqlen_k), section_works = num_tiles * s.chunks * section_heads;
  const int local = index - first_row * per_tile, section = local / section_works;
  const int heads = min_of(section_heads, s.head_blocks - section * section_heads);
  const int inside = local - section * section_works, step = inside / heads;
  const int block = section * section_heads + inside - step * heads;
  const int tile = num_tiles - 1 - step / s.chunks, chunk = s.chunks - 1 - step % s.chunks;
  const int first_token = tile * p.tile_q + chunk * s.chunk_tokens;
  const int limit = min_of(seqlen_q, (tile + 1) * p.tile_q);
  if (tile < 0 || first_token >= limit) return true;
  w.first_token = first_token;
  w.num_tokens = min_of(s.chunk_tokens, limit - first_token);
  w.kv_head = block / s.blocks_per_group;
  w.q_head = block * s.pack;
  w.draft = w.seqlen_k - seqlen_q;
  w.position = w.draft + w.first_token;

  const KeyRange first_keys = keys_at(p, w.position, w.seqlen_k);
  const KeyRange last_keys = keys_at(p, static_cast<int64_t>(w.position) + w.num_tokens - 1, w.seqlen_k);
  w.key_begin = first_keys.begin;
  w.key_end = max_of(last_keys.end, w.key_begin);
  w.known_begin = keys_at(p, w.draft, w.seqlen_k).begin;
  w.known_end = p.tree_mask != nullptr ? clamp(w.draft, 0, w.seqlen_k) : w.seqlen_k;
  w.tile_begin = w.key_begin / kKeys;
  w.tile_end = w.key_end > w.key_begin ? ceil_div(w.key_end, kKeys) : w.tile_begin;
  return true;
}

// Whether a tile has keys that no query of the request sees: memory behind the request, before every window, or of a
// draft token. It may hold anything, so its values are brought row by row and replaced with zeros.
template <int kKeys>
__device__ __forceinline__ bool is_edge(const Work& w, int tile) {
  return tile * kKeys < w.known_begin || (tile + 1) * kKeys > w.known_end;
}

// Whether a tree mask leaves draft token `draft` to query token `token` of the request.
__device__ __forceinline__ bool tree_allows(const Params& p, const Work& w, int token, int draft) {
  if (draft < 0) return true;
  if (draft / 8 >= p.tree_mask_bytes) return false;
  const uint8_t* bits = p.tree_mask + (static_cast<int64_t>(w.first_q_token) + token) * p.tree_mask_stride_token;
  return (bits[draft / 8] >> (draft % 8)) & 1;
}

// The same of 32 draft tokens, a bit each.
__device__ __forceinline__ uint32_t tree_bits(const Params& p, const Work& w, int token, int first_draft) {
  const uint8_t* bits = p.tree_mask + (static_cast<int64_t>(w.first_q_token) + token) * p.tree_mask_stride_token;
  uint32_t result = 0;
#pragma unroll 1
  for (int i = 0; i < 32;) {
    const int draft = first_draft + i, inside = draft & 7;
    uint32_t byte = 0xff;  // what comes before the new tokens is visible
    if (draft >= 0) byte = draft / 8 < p.tree_mask_bytes ? bits[draft / 8] : 0;
    result |= (byte >> inside) << i;
    i += 8 - inside;
  }
  return result;
}

// Rows behind the last request belong to nobody: padding of a captured batch. They must not stay garbage.
template <typename T>
__device__ __forceinline__ void clear_padding(const Params& p) {
  const int64_t first = clamp(p.cu_seqlens_q[p.batch_size], 0, p.num_q_tokens);
  const int64_t rows = (p.num_q_tokens - first) * p.num_q_heads;
  for (int64_t i = blockIdx.x; i < rows; i += gridDim.x) {
    const int64_t token = first + i / p.num_q_heads, head = i % p.num_q_heads;
    T* out = static_cast<T*>(p.out) + token * p.out_stride_token + head * p.out_stride_head;
    for (int d = threadIdx.x % 128; d < p.head_dim_v; d += 128) out[d] = T(0.f);
    if (p.lse != nullptr && threadIdx.x % 128 == 0) p.lse[token * p.num_q_heads + head] = -INFINITY;
  }
}

}  // namespace attnops::fmha::sm90
