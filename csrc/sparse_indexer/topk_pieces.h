#pragma once
#include "sparse_indexer/logits.h"
#include "sparse_indexer/rows.h"
#include "sparse_indexer/topk_parts.h"

// index_topk where the scratch has no room for whole rows of logits: a row's keys come in pieces, and the k best so
// far, its candidates, stand in front of the next piece's logits with their own. One selection of both finds what it
// would find of all keys: candidates are in rising order, and all of them come before the piece. Nothing is compared
// twice in another way, so bits are those of whole rows.
namespace attnops::sparse_indexer {

struct PieceParams {
  LogitsParams logits;  // of the rows of a turn, over all of their keys
  SelectParams select;  // what they get in the end
  int64_t first_key, keys;
  float* scratch;              // [rows, stride]: candidates, the last one next to the piece's logits, and these
  int64_t stride, columns;     // columns: of both
  int carried;                 // of the candidates: k, rounded up
  int32_t *found, *positions;  // [rows, carried]: columns that are selected; positions of candidates
  int32_t *begins, *counts;    // [rows]: the first column of a row, and how many it has
  int32_t* seen;               // [rows]: keys of the piece that have logits
};

inline constexpr int64_t kPieceInts = 4;           // of a row, beside its columns: begins, counts, seen, and none
inline constexpr int64_t kLeastRowsTogether = 64;  // of a turn, before keys are divided
inline constexpr int64_t kMostColumns = 1 << 17;   // of a piece: what selection streams on a GPU

// How a scratch of so many floats is used.
struct TopkLayout {
  int64_t rows, keys;  // of a turn, and of a piece: 0 where rows are whole
  int64_t least = 0;   // floats, where those that there are do not do
};

inline int64_t carried_columns(int k) { return round_up(k, 4); }

// Keys of a piece, in whole pages, where so many rows share the scratch.
inline int64_t keys_of_piece(int64_t floats, int64_t rows, int k, int page_size) {
  const int64_t room = floats / rows - 3 * carried_columns(k) - kPieceInts - 3;
  const int64_t keys = min_of(room, max_of<int64_t>(kMostColumns - carried_columns(k) - 3, page_size));
  return keys > 0 ? keys - keys % page_size : 0;
}

inline TopkLayout topk_layout(int64_t floats, int64_t rows, int64_t keys, int k, int page_size) {
  if (rows == 0 || keys == 0) return {max_of<int64_t>(rows, 1), 0};
  // Rows that share a turn keep all multiprocessors busy; a piece of few keys would mostly select among candidates.
  const int64_t enough = min_of(max_of<int64_t>(page_size, 8 * int64_t{k}), keys);
  int64_t together = min_of(rows, kLeastRowsTogether);
  while (together > 1 && keys_of_piece(floats, together, k, page_size) < enough)
    together = ceil_div<int64_t>(together, 2);
  if (const int64_t whole = floats / round_up<int64_t>(keys, 4); whole >= together) {
    const int64_t turns = ceil_div(rows, whole);
    return {min_of(round_up<int64_t>(ceil_div(rows, turns), 8), whole), 0};
  }
  const int64_t piece = keys_of_piece(floats, together, k, page_size);
  return {together, piece, piece > 0 ? 0 : 3 * carried_columns(k) + kPieceInts + 3 + page_size};
}

// The first piece of a turn.
inline PieceParams first_piece(const IndexTopkParams& p) {
  const int carried = static_cast<int>(carried_columns(p.select.k));
  const int64_t rows = p.logits.num_rows, stride = carried + round_up<int64_t>(p.piece_keys, 4);
  auto* const ints = reinterpret_cast<int32_t*>(p.scratch + rows * stride);
  return {.logits = p.logits,
          .select = p.select,
          .first_key = 0,
          .keys = p.piece_keys,
          .scratch = p.scratch,
          .stride = stride,
          .columns = carried + p.piece_keys,
          .carried = carried,
          .found = ints,
          .positions = ints + rows * carried,
          .begins = ints + 2 * rows * carried,
          .counts = ints + 2 * rows * carried + rows,
          .seen = ints + 2 * rows * carried + 2 * rows};
}

// What the ops of logits and of selection are asked about a piece: keys of a table that begins with it, and columns of
// the scratch. Its faults have been told of.
inline IndexTopkParams call_of(const PieceParams& p) {
  IndexTopkParams call{.logits = p.logits, .select = {}, .rows_at_once = p.logits.num_rows};
  LogitsParams& logits = call.logits;
  const int64_t cells = p.keys / logits.pages.page_size, first_cell = p.first_key / logits.pages.page_size;
  logits.logits = p.scratch + p.carried;
  logits.stride_row = p.stride;
  logits.columns = p.keys;
  logits.page_table += first_cell;
  logits.max_pages = min_of(cells, logits.max_pages - first_cell);
  logits.cache_seqlens = p.seen;
  logits.row_starts = nullptr;
  logits.report = nullptr;
  SelectParams& select = call.select;
  select.num_rows = logits.num_rows;
  select.k = p.select.k;
  select.logits = p.scratch;
  select.stride_row = p.stride;
  select.columns = p.columns;
  select.dtype = DType::kFloat32;
  select.lengths = p.counts;
  select.row_starts = p.begins;
  select.page_size = 1;
  select.indices = p.found;
  select.stride_indices = p.carried;
  return call;
}

// Runs begin(first piece), then run(ops of a piece) and carry(piece) for one after the other.
template <class Begin, class Run, class Carry>
void for_each_piece(const IndexTopkParams& part, const Begin& begin, const Run& run, const Carry& carry) {
  PieceParams piece = first_piece(part);
  const int64_t end = part.logits.max_pages * part.logits.pages.page_size;
  begin(piece);
  for (; piece.first_key < end; piece.first_key += piece.keys) {
    run(call_of(piece));
    carry(piece);
  }
}

// What a row has in the piece from `first_key` on.
ATTNOPS_HOST_DEVICE inline void begin_piece(const PieceParams& p, int64_t row, const RowKeys& keys, int64_t first_key,
                                            int candidates) {
  const auto inside = [&](int64_t key) { return min_of(max_of<int64_t>(key - first_key, 0), p.keys); };
  const int64_t begin = inside(keys.start), end = keys.count > 0 ? inside(keys.start + keys.count) : 0;
  const bool has_keys = end > begin;
  p.seen[row] = static_cast<int32_t>(has_keys ? end : 0);
  p.begins[row] = static_cast<int32_t>(p.carried + (candidates > 0 ? -candidates : begin));
  p.counts[row] = static_cast<int32_t>(has_keys ? candidates + end - begin : 0);
}

// Tells of all faults of a row. `run` calls a function for numbers below one, each once.
template <class Run>
ATTNOPS_HOST_DEVICE inline void report_all(const PieceParams& p, int64_t row, const Run& run) {
  const LogitsParams& logits = p.logits;
  const int64_t capacity = logits.max_pages * logits.pages.page_size;
  const int64_t length = min_of<int64_t>(logits.cache_seqlens[row], capacity);
  run(1, [&](int64_t) {
    report_row(logits, row);
    report_row(p.select, row);
  });
  if (length <= 0) return;
  run(ceil_div<int64_t>(length, logits.pages.page_size),
      [&](int64_t cell) { page_of_key(logits, row / logits.seqlen_q, cell, true); });
}

// A selected key of a piece: where it is among the row's keys, and its logit.
struct Candidate {
  int32_t position;
  float logit;
};
ATTNOPS_HOST_DEVICE inline Candidate candidate_of(const PieceParams& p, int64_t row, const RowKeys& keys, int i) {
  const int64_t column = int64_t{p.begins[row]} + p.found[row * p.carried + i];
  const int64_t position =
      column < p.carried ? p.positions[row * p.carried + column] : p.first_key + column - p.carried - keys.start;
  return {static_cast<int32_t>(position), p.scratch[row * p.stride + column]};
}

ATTNOPS_HOST_DEVICE inline void keep_candidate(const PieceParams& p, int64_t row, const Candidate& candidate, int i,
                                               int count) {
  const int64_t column = p.carried - count + i;
  p.positions[row * p.carried + column] = candidate.position;
  p.scratch[row * p.stride + column] = candidate.logit;
}

// An output of the call; a position below 0 is none.
ATTNOPS_HOST_DEVICE inline void put(const PieceParams& p, int64_t row, const RowKeys& keys, int i, int32_t position) {
  const SelectParams& s = p.select;
  s.indices[row * s.stride_indices + i] = position < 0 ? -1 : index_of(s, row, keys.request, position);
  if (s.positions != nullptr) s.positions[row * s.stride_positions + i] = position;
}

}  // namespace attnops::sparse_indexer
