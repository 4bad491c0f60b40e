#pragma once
#include "core/divisor.h"
#include "core/math.h"
#include "core/report.h"
#include "core/tree_window.h"
#include "core/types.h"
#include "fmha/params.h"
#include "fmha/sm90/row_units.h"
#include "scheduler/varlen_cuts.h"

namespace attnops::fmha::sm90 {

inline constexpr int64_t kSectionBytes = 24 << 20;  // of keys and values: half of L2

// What the host derives from Params for a launch.
struct Schedule {
  int num_works;       // (max_pieces + num_tiles) * works_per_tile
  int max_pieces;      // 0: tiles are left whole
  int works_per_tile;  // chunks * head_blocks
  int head_blocks;     // KV heads times blocks of `pack` heads in a group
  int blocks_per_group;
  int group;
  int pack;          // query heads of a group in a tile's rows; the last block of a group may have fewer
  int chunks;        // tiles of the CTA in a tile of the plan
  int chunk_tokens;  // query tokens of a CTA's tile
  int turns;         // works that a CTA takes at once: 1, or all chunks of a tile, of which as a rule one has tokens
  int takes;         // num_works / turns
  int cluster;       // 2: neighbours in the works' order share their keys, and a pair of CTAs brings them once
  int box_keys;      // rows of a box of the copy engine; 0: rows are gathered
  int window_step;   // a window's tiles begin at a multiple of so many keys; 0: at a multiple of a tile
  int pack_inverse;  // ceil(2^16 / pack): row / pack = row * pack_inverse >> 16 below 2^8 rows
  RowUnits key_rows, value_rows;  // where rows are gathered
  // Of the call, in 32 bits: rows of q, rows of k, tokens that a row of the page table has room for (-1: rows differ).
  int q_tokens, k_tokens, room;
  int whole_keys;  // with so many keys or fewer, all heads of a request are one section (heads_at_a_time)
  // A thread alone divides a work's number several times before its first tile can be asked for.
  Divisor page_size, tile_q, by_works_per_tile, by_head_blocks, by_blocks_per_group, by_chunks;
  int plain;     // 1: rows see ranges of keys, and scores have one positive scale that the host knows
  int together;  // short works that a CTA may take at once
};

// As many heads of a group as fill `rows` beside a tile's tokens, in blocks that are as alike as can be.
inline int heads_per_tile(int group, int tile_q, int rows) {
  const int most = max_of(min_of(group, rows / min_of(tile_q, rows)), 1);
  return ceil_div(group, ceil_div(group, most));
}

// Whether rows see ranges of keys, and scores have no cap.
inline bool has_ranges(const Params& p) {
  return p.tree_mask == nullptr && p.hidden_keys == nullptr && p.logit_cap == 0.f;
}

// The same, and scores have one positive scale that the host knows.
inline bool is_plain(const Params& p) { return has_ranges(p) && p.k_scale == nullptr && p.softmax_scale > 0.f; }

// Of tiles of `rows` rows, without pieces.
inline Schedule schedule_of(const Params& p, int rows, int pack) {
  Schedule s{};
  s.group = p.num_q_heads / p.num_kv_heads;
  s.pack = pack;
  s.blocks_per_group = ceil_div(s.group, pack);
  s.head_blocks = p.num_kv_heads * s.blocks_per_group;
  s.chunk_tokens = min_of(p.tile_q, rows / pack);
  s.chunks = ceil_div(p.tile_q, s.chunk_tokens);
  s.works_per_tile = s.head_blocks * s.chunks;
  s.num_works = p.num_tiles * s.works_per_tile;
  s.turns = 1;
  s.takes = s.num_works;
  s.cluster = 1;
  s.plain = is_plain(p);
  s.together = 1;
  s.pack_inverse = ceil_div(1 << 16, pack);
  constexpr int64_t kMost = INT32_MAX;
  s.q_tokens = static_cast<int>(min_of(p.num_q_tokens, kMost));
  s.k_tokens = static_cast<int>(min_of(p.num_k_tokens, kMost));
  s.room = p.paged && p.page_table.kv_indptr == nullptr ? p.page_table.num_tokens(0) : -1;
  const int64_t key_bytes = int64_t{p.num_kv_heads} * (p.head_dim_qk + p.head_dim_v) * size_of(p.kv_dtype);
  s.whole_keys = static_cast<int>(min_of(kSectionBytes / max_of(key_bytes, int64_t{1}), kMost));
  s.page_size = Divisor(p.paged ? p.page_table.page_size : 1);
  s.tile_q = Divisor(p.tile_q);
  s.by_works_per_tile = Divisor(s.works_per_tile);
  s.by_head_blocks = Divisor(s.head_blocks);
  s.by_blocks_per_group = Divisor(s.blocks_per_group);
  s.by_chunks = Divisor(s.chunks);
  return s;
}

// One tile of query rows and the keys that it sees. Written by the producer, read by all.
struct Work {
  int request;
  int first_token, num_tokens;  // within the request
  int first_q_token;            // of the request, in q
  int seqlen_k;
  int first_k_token;  // the first key that counts (begin_at_window): in ragged k; in pages, behind the request's first
  int draft;          // position of the request's first new token
  int kv_head, q_head;
  int key_begin, key_end;      // that any row of the tile may see
  int known_begin, known_end;  // tiles within need no care for memory that nobody owns
  int tile_begin, tile_end;    // of keys, without those that no row sees
  int gap_begin, gap_tiles;    // which lie before tile `gap_begin`
  int slab;                    // of a piece, in the scratch of partial results; -1: a whole tile

  __device__ __forceinline__ int position() const { return draft + first_token; }  // of first_token

  // The place of a tile among all of the request's.
  __device__ __forceinline__ int place_of(int tile) const { return tile < gap_begin ? tile : tile + gap_tiles; }
  __device__ __forceinline__ int tile_of(int place) const {
    return min_of(place, max_of(place - gap_tiles, gap_begin));
  }
};
static_assert(sizeof(Work) <= 72);  // SharedLayout::kWorkBytes

// What a row of the tile is.
struct RowPlace {
  int token, head;  // of the work, of the call
  bool exists;
};

__device__ __forceinline__ RowPlace place_of_row(const Schedule& s, const Work& w, int row) {
  const int token = row * s.pack_inverse >> 16, head = w.q_head + row - token * s.pack;
  return {token, head, token < w.num_tokens && head < (w.kv_head + 1) * s.group};
}

// Keys [begin, end) that position and length leave to the token at `position`. A tree mask then takes keys away, and
// moves the beginning of a window (keys_of_token).
struct KeyRange {
  int begin, end;
};

// Whether masks need what only some calls have. kPlain: of calls that are Schedule::plain, by kernels for no others.
template <bool kPlain>
__device__ __forceinline__ bool has_tree(const Params& p) {
  return !kPlain && p.tree_mask != nullptr;
}
template <bool kPlain>
__device__ __forceinline__ bool hides_keys(const Params& p) {
  return !kPlain && p.hidden_keys != nullptr;
}

// In 32 bits, as both ends of a position's range lie within [0, seqlen_k]. A position is at most seqlen_k - 1.
template <bool kPlain = false>
__device__ __forceinline__ KeyRange keys_at(const Params& p, int position, int seqlen_k) {
  int begin = 0, end = seqlen_k;
  if (p.window_left >= 0) begin = position > p.window_left ? position - p.window_left : 0;
  if (p.causal && !has_tree<kPlain>(p)) end = position + 1;
  if (p.window_right >= 0) {
    const unsigned behind = static_cast<unsigned>(end) - static_cast<unsigned>(position) - 1;  // position may be < 0
    if (static_cast<unsigned>(p.window_right) < behind) end = position + p.window_right + 1;
  }
  return {begin, max_of(end, begin)};
}

__device__ __forceinline__ int clamp(int64_t value, int64_t low, int64_t high) {
  return static_cast<int>(value < low ? low : value > high ? high : value);
}

// What a tree mask holds of query token `token` of the request.
__device__ __forceinline__ const uint8_t* tree_row(const Params& p, const Work& w, int token) {
  return p.tree_mask + (static_cast<int64_t>(w.first_q_token) + token) * p.tree_mask_stride_token;
}

// Where the window of query token `token` begins, where there are a window and a tree mask.
__device__ __forceinline__ int tree_begin(const Params& p, const Work& w, int token) {
  const int64_t drafts = min_of<int64_t>(static_cast<int64_t>(w.seqlen_k) - w.draft, 8 * p.tree_mask_bytes);
  return clamp(tree_window_begin(tree_row(p, w, token), drafts, w.draft, p.window_left), 0, w.seqlen_k);
}

// keys_at of token `token` of the request, whose window may begin by its depth in a tree.
__device__ __forceinline__ KeyRange keys_of_token(const Params& p, const Work& w, int token) {
  KeyRange keys = keys_at(p, w.draft + token, w.seqlen_k);
  if (p.tree_mask != nullptr && p.window_left >= 0) {
    keys.begin = tree_begin(p, w, token);
    keys.end = max_of(keys.end, keys.begin);
  }
  return keys;
}

// Keys [begin, end) that query token `token` of the request does not see, whatever else it may.
__device__ __forceinline__ KeyRange hidden_from(const Params& p, const Work& w, int token) {
  if (p.hidden_keys == nullptr) return {INT32_MAX, INT32_MAX};
  const int32_t* keys = p.hidden_keys + 2 * (static_cast<int64_t>(w.first_q_token) + token);
  return {keys[0], keys[1]};
}

__device__ __forceinline__ bool hides(const Params& p, const Work& w, int token, int key) {
  if (p.hidden_keys == nullptr) return false;
  const KeyRange hidden = hidden_from(p, w, token);
  return key >= hidden.begin && key < hidden.end;
}

// Bounds of the keys that some of tokens [first, last] of the request see, and of keys that all of them see. In a tree
// each may have any depth.
template <bool kPlain>
__device__ __forceinline__ KeyRange keys_of_some(const Params& p, const Work& w, int first, int last) {
  const int begin = keys_at<kPlain>(p, w.draft + (has_tree<kPlain>(p) ? 0 : first), w.seqlen_k).begin;
  return {begin, max_of(keys_at<kPlain>(p, w.draft + last, w.seqlen_k).end, begin)};
}
__device__ __forceinline__ KeyRange keys_of_all(const Params& p, const Work& w, int first, int last) {
  const int deepest = p.tree_mask != nullptr ? w.seqlen_k - 1 : w.draft + last;
  int end = keys_at(p, w.draft + first, w.seqlen_k).end;
  if (p.tree_mask != nullptr) end = min_of(end, max_of(w.draft, 0));
  if (p.hidden_keys != nullptr) end = min_of(end, hidden_from(p, w, first).begin);  // no later token's is lower
  return {keys_at(p, deepest, w.seqlen_k).begin, end};
}

// How many blocks of heads take turns over a request's tiles: as many as have their keys in half of L2. The others
// follow when these are done with all tiles.
__device__ __forceinline__ int heads_at_a_time(const Params& p, const Schedule& s, int seqlen_k) {
  constexpr float kBytes = kSectionBytes;
  const float bytes = static_cast<float>(max_of(seqlen_k, 1)) * ((p.head_dim_qk + p.head_dim_v) * size_of(p.kv_dtype));
  const int kv_heads = static_cast<int>(min_of(__fdividef(kBytes, bytes), static_cast<float>(p.num_kv_heads)));
  return min_of(max_of(kv_heads, 1) * s.blocks_per_group, s.head_blocks);
}

// How the plan cuts tiles (scheduler/varlen_cuts.h): its pieces come before all tiles that are whole.
struct Cuts {
  int pieces = 0, limit = kNeverCut;
};

__device__ __forceinline__ Cuts cuts_of(const Params& p, const Schedule& s) {
  if (s.max_pieces == 0) return {};
  const int2 head = *reinterpret_cast<const int2*>(p.pieces);
  return {clamp(head.x, 0, s.max_pieces), head.x > 0 ? head.y : kNeverCut};
}

// As the plan decided it, of the tile of row `row`.
__device__ __forceinline__ bool is_cut(const Params& p, const Cuts& cuts, int row, int seqlen_q, int64_t seqlen_k,
                                       int tile) {
  if (row < p.pieces[2]) return false;
  const VarlenGeometry geometry{p.batch_size, p.tile_q, p.window_left, p.causal};
  const int keys = clamp(seqlen_k, INT32_MIN, INT32_MAX);
  return cost_units(varlen_tile_cost(geometry, seqlen_q, keys, tile)) > cuts.limit;
}

// What of a work its request decides. Returns the queries of the request.
template <int kKeys>
__device__ __forceinline__ int decode_request(const Params& p, const Schedule& s, int request, int64_t& planned_keys,
                                              Work& w) {
  constexpr int kMostKeys = INT32_MAX - 2 * kKeys;
  const auto within = [](int x, int low, int high) { return min_of(max_of(x, low), high); };
  w.request = request;
  const int first = p.cu_seqlens_q[request], end = p.cu_seqlens_q[request + 1];
  if (p.paged) {
    const int keys = p.cache_seqlens[request], room = s.room >= 0 ? s.room : p.page_table.num_tokens(request);
    planned_keys = keys;
    w.first_k_token = 0;
    if (keys > room && p.report != nullptr) {
      record_fault(p.report, {ReportOp::kFmhaPaged, ReportKind::kLength, request, 0, keys, room + int64_t{1}});
    }
    w.seqlen_k = within(min_of(keys, room), 0, kMostKeys);
  } else {
    const int first_key = p.cu_seqlens_k[request], end_key = p.cu_seqlens_k[request + 1];
    planned_keys = static_cast<int64_t>(end_key) - first_key;
    w.first_k_token = within(first_key, 0, s.k_tokens);
    w.seqlen_k = min_of(within(end_key, w.first_k_token, s.k_tokens) - w.first_k_token, kMostKeys);
  }
  w.first_q_token = within(first, 0, s.q_tokens);
  return within(end, w.first_q_token, s.q_tokens) - w.first_q_token;
}

// Leaves out tiles that are hidden from all tokens of the work. `tiles`: those from `tile_begin` on.
template <int kKeys, bool kPlain>
__device__ __forceinline__ void leave_gap(const Params& p, int tile_begin, int& tiles, Work& w) {
  w.gap_begin = INT32_MAX;
  w.gap_tiles = 0;
  if (!hides_keys<kPlain>(p)) return;
  const int64_t begin = hidden_from(p, w, w.first_token + w.num_tokens - 1).begin;
  const int end = hidden_from(p, w, w.first_token).end;
  const int first = clamp((begin + kKeys - 1) / kKeys, tile_begin, tile_begin + tiles);
  const int count = clamp(end / kKeys, first, tile_begin + tiles) - first;
  if (count == 0) return;
  w.gap_begin = first;
  w.gap_tiles = count;
  tiles -= count;
}

// Lets the work's keys begin with the first one that its window reaches, so that no tile begins before it: keys before
// are then none of the request's. What a row adds up together then depends on the tile that it is in.
__device__ __forceinline__ void begin_at_window(const Schedule& s, Work& w, KeyRange& keys) {
  if (s.window_step == 0) return;
  const int skipped = keys.begin - keys.begin % s.window_step;
  w.first_k_token += skipped, w.seqlen_k -= skipped, w.draft -= skipped;
  keys.begin -= skipped, keys.end -= skipped;
}

// The rest: rows `chunk` of a tile of the plan, a block of heads, and a piece of its keys. Without tokens: no such
// tile.
template <int kKeys, bool kPlain>
__device__ __forceinline__ void place_work(const Params& p, const Schedule& s, int seqlen_q, int tile, int chunk,
                                           int block, int piece, int pieces, Work& w) {
  const int inside = chunk * s.chunk_tokens;  // below tile_q; the tile is one of the request's
  const int first_token = tile * p.tile_q + inside;
  w.num_tokens = 0;
  if (tile < 0 || first_token >= seqlen_q) return;
  w.first_token = first_token;
  w.num_tokens = min_of(s.chunk_tokens, min_of(p.tile_q - inside, seqlen_q - first_token));
  w.kv_head = s.by_blocks_per_group.divide(block);
  w.q_head = w.kv_head * s.group + (block - w.kv_head * s.blocks_per_group) * s.pack;
  w.draft = w.seqlen_k - seqlen_q;

  KeyRange keys = keys_of_some<kPlain>(p, w, first_token, first_token + w.num_tokens - 1);
  if (pieces <= 1) begin_at_window(s, w, keys);
  w.key_begin = keys.begin;
  w.key_end = keys.end;
  w.known_begin = keys_at<kPlain>(p, w.draft, w.seqlen_k).begin;
  w.known_end = has_tree<kPlain>(p) ? clamp(w.draft, 0, w.seqlen_k) : w.seqlen_k;
  const int tile_begin = static_cast<unsigned>(w.key_begin) / kKeys;
  int tiles = w.key_end > w.key_begin ? ceil_div(w.key_end, kKeys) - tile_begin : 0;
  leave_gap<kKeys, kPlain>(p, tile_begin, tiles, w);
  w.tile_begin = tile_begin;
  w.tile_end = tile_begin + tiles;
  if (pieces > 1) {
    w.tile_begin = tile_begin + static_cast<int>(static_cast<int64_t>(tiles) * piece / pieces);
    w.tile_end = tile_begin + static_cast<int>(static_cast<int64_t>(tiles) * (piece + 1) / pieces);
  }
}

// Piece `index / works_per_tile` of the plan. Without tokens: none that can be.
template <int kKeys, bool kPlain>
__device__ __forceinline__ void decode_piece(const Params& p, const Schedule& s, int index, Work& w) {
  const int piece = s.by_works_per_tile.divide(index), local = index - piece * s.works_per_tile;
  const int4 entry = *reinterpret_cast<const int4*>(p.pieces + 4 * (piece + 1ll));
  w.num_tokens = 0;
  if (entry.x < 0 || entry.x >= p.batch_size || entry.y < 0 || entry.z < 0 || entry.z >= entry.w) return;
  int64_t planned_keys;
  const int seqlen_q = decode_request<kKeys>(p, s, entry.x, planned_keys, w);
  if (entry.y > s.tile_q.divide(seqlen_q)) return;
  const int chunk = s.by_head_blocks.divide(local);
  place_work<kKeys, kPlain>(p, s, seqlen_q, entry.y, chunk, local - chunk * s.head_blocks, entry.z, entry.w, w);
  w.slab = index;
}

// Work number `index`: pieces, then requests in the plan's order, in each the sections of heads, in each the tiles from
// the last and their heads. False: the plan has no such row, and none behind it. What is no whole tile of its request
// has no tokens.
template <int kKeys, bool kPlain = false>
__device__ __forceinline__ bool decode_work(const Params& p, const Schedule& s, const Cuts& cuts, int index, Work& w) {
  const auto entry_at = [&p](int row) {
    return *reinterpret_cast<const int2*>(p.tile_order + 2 * static_cast<int64_t>(min_of(row, p.num_tiles - 1)));
  };
  int row = s.by_works_per_tile.divide(index);
  int2 entry = entry_at(row);  // read before it is known whether there are pieces: most plans have none
  if (cuts.pieces > 0) {
    if (row < cuts.pieces) {
      decode_piece<kKeys, kPlain>(p, s, index, w);
      return true;
    }
    row -= cuts.pieces;
    index -= cuts.pieces * s.works_per_tile;
    entry = entry_at(row);
  }
  // Of a request whose heads are one section, where a row of the plan is a tile: known while the row is read.
  const int own = index - row * s.works_per_tile, own_step = s.by_head_blocks.divide(own);
  if (row >= p.num_tiles) return false;
  w.num_tokens = 0;
  if (entry.x < 0) return false;
  if (entry.x >= p.batch_size) return true;
  int64_t planned_keys;
  const int seqlen_q = decode_request<kKeys>(p, s, entry.x, planned_keys, w);
  const int num_tiles = seqlen_q > 0 ? s.tile_q.divide(seqlen_q - 1) + 1 : 0;
  if (entry.y < 0 || entry.y >= num_tiles) return true;
  int tile = entry.y, tile_row = row, chunk = s.chunks - 1 - own_step, block = own - own_step * s.head_blocks;
  if (w.seqlen_k > s.whole_keys) {
    const int first_row = row - (num_tiles - 1 - entry.y);
    if (first_row < 0) return true;
    const int section_heads = heads_at_a_time(p, s, w.seqlen_k), local = index - first_row * s.works_per_tile;
    const int section_works = num_tiles * s.chunks * section_heads, section = local / section_works;
    const int heads = min_of(section_heads, s.head_blocks - section * section_heads);
    const int inside = local - section * section_works;
    const int step = inside / heads, from_last = s.by_chunks.divide(step);
    block = section * section_heads + inside - step * heads;
    tile = num_tiles - 1 - from_last;
    tile_row = first_row + from_last;
    chunk = s.chunks - 1 - (step - from_last * s.chunks);
  }
  if (cuts.limit != kNeverCut && is_cut(p, cuts, tile_row, seqlen_q, planned_keys, tile)) return true;
  place_work<kKeys, kPlain>(p, s, seqlen_q, tile, chunk, block, 0, 1, w);
  w.slab = -1;
  return true;
}

// Work number `turn` of those that are taken at once: of a tile that is whole, its chunks from the first.
__device__ __forceinline__ int index_in_turn(const Schedule& s, int taken, int turn) {
  if (s.turns == 1) return taken;
  const int tile = s.by_head_blocks.divide(taken);
  return taken + tile * (s.works_per_tile - s.head_blocks) + (s.turns - 1 - turn) * s.head_blocks;
}

// Whether a work is the last chunk with tokens of a whole tile, whose chunks follow each other.
__device__ __forceinline__ bool ends_request(const Schedule& s, const Work& w) {
  return w.num_tokens > 0 && w.slab < 0 && w.seqlen_k <= s.whole_keys &&
         w.first_token + w.num_tokens >= w.seqlen_k - w.draft;
}

// How many keys of its only tile a work has, from the tile's first on; 0 where it has another number of tiles. Of plain
// calls alone: they have no gaps.
template <int kKeys>
__device__ __forceinline__ int keys_of_only_tile(const Work& w) {
  return w.tile_end - w.tile_begin == 1 ? min_of(w.key_end - w.tile_begin * kKeys, kKeys) : 0;
}

// Whether a tile has keys that no query of the request sees: memory behind the request, before every window, or of a
// draft token. It may hold anything, so its values are brought row by row and replaced with zeros.
template <int kKeys>
__device__ __forceinline__ bool is_edge(const Work& w, int tile) {
  const int place = w.place_of(tile);
  return place * kKeys < w.known_begin || (place + 1) * kKeys > w.known_end;
}

// Whether a tree mask leaves draft token `draft` to query token `token` of the request.
__device__ __forceinline__ bool tree_allows(const Params& p, const Work& w, int token, int draft) {
  if (draft < 0) return true;
  if (draft / 8 >= p.tree_mask_bytes) return false;
  return (tree_row(p, w, token)[draft / 8] >> (draft % 8)) & 1;
}

// Whether some row of the work sees a key. Tree and window may each leave it to rows that the other takes it from.
__device__ __forceinline__ bool is_seen(const Params& p, const Work& w, int key) {
  if (p.tree_mask == nullptr || key < w.draft) return true;
#pragma unroll 1
  for (int i = 0; i < w.num_tokens; ++i) {
    const int token = w.first_token + i;
    if (!tree_allows(p, w, token, key - w.draft)) continue;
    if (p.window_right >= 0 && key - w.draft - token > p.window_right) continue;
    if (p.window_left < 0 || key >= tree_begin(p, w, token)) return true;
  }
  return false;
}

// What `tree_allows` says of 32 draft tokens, a bit each.
__device__ __forceinline__ uint32_t tree_bits(const Params& p, const Work& w, int token, int first_draft) {
  const uint8_t* bits = tree_row(p, w, token);
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
