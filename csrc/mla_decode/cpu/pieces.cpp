#include "mla_decode/cpu/pieces.h"

#include <bit>
#include <cmath>
#include <cstring>
#include <initializer_list>

#include "core/report.h"
#include "core/softmax_state.h"
#include "core/tree_window.h"
#include "cpu/convert.h"
#include "mla_decode/rounded_keys.h"

namespace attnops::mla_decode::cpu {
namespace {

int num_rows_of_request(const Params& p) { return p.seqlen_q * p.num_q_heads; }

TileRange tiles_of(const Params& p, int request) {
  return visible_tiles(keys_of_request(p, request), p.seqlen_q, p.window_left, kPlanTileTokens);
}

int fixed_cuts(const Params& p, int request) {
  return ceil_div(tiles_of(p, request).count, p.fixed_split_tokens / kPlanTileTokens);
}

// First partial row of a request's cuts of its block `block` of rows, in batch-invariant mode.
int64_t first_cut(const Params& p, int request, int block, int cuts) {
  const int blocks = blocks_per_request(p.seqlen_q, p.num_q_heads);
  return static_cast<int64_t>(p.num_splits[request]) * blocks + static_cast<int64_t>(block) * cuts;
}

SplitKvEntry entry_of(const Params& p, int part) {
  SplitKvEntry entry;
  std::memcpy(&entry, p.tile_scheduler_metadata + static_cast<int64_t>(part) * kSplitKvEntrySize, sizeof(entry));
  return entry;
}

const uint8_t* tree_row(const Params& p, int request, int token) {
  return p.tree_mask + request * p.tree_mask_stride_request + token * p.tree_mask_stride_token;
}

// The keys [begin, end) that query token `token` may see, the tree's bits aside.
KvRange keys_of_token(const Params& p, int request, int length, int token) {
  const int position = length - p.seqlen_q + token;
  if (p.tree_mask) {
    const int64_t begin = p.window_left < 0 ? 0
                                            : tree_window_begin(tree_row(p, request, token), p.tree_keys,
                                                                length - p.tree_keys, p.window_left);
    return {static_cast<int>(max_of<int64_t>(begin, 0)), length};
  }
  return {p.window_left < 0 ? 0 : max_of(position - p.window_left, 0), p.causal ? max_of(position + 1, 0) : length};
}

bool tree_visible(const Params& p, int request, int token, int draft) {
  return (tree_row(p, request, token)[draft / 8] >> (draft % 8)) & 1;
}

uint64_t bits_below(int count) { return count >= 64 ? ~uint64_t{0} : (uint64_t{1} << count) - 1; }

// Which of the keys [first_key, first_key + kPlanTileTokens) query token `token` sees.
uint64_t visible_bits(const Params& p, int request, int length, int token, int first_key) {
  const KvRange keys = keys_of_token(p, request, length, token);
  const int begin = max_of(keys.begin - first_key, 0), end = min_of(keys.end - first_key, kPlanTileTokens);
  if (begin >= end) return 0;
  uint64_t bits = bits_below(end) & ~bits_below(begin);
  if (p.tree_mask == nullptr) return bits;
  const int first_draft = length - p.tree_keys - first_key;
  for (int k = max_of(first_draft, begin); k < end; ++k) {
    if (!tree_visible(p, request, token, k - first_draft)) bits &= ~(uint64_t{1} << k);
  }
  return bits;
}

// Fills `visible`; returns the keys that some row sees.
uint64_t mask_tile(const Params& p, const Piece& piece, int length, int first_key, KeyTile& tile) {
  uint64_t any = 0, all = ~uint64_t{0};
  for (int row = 0; row < piece.num_rows;) {
    const int token = (piece.first_row + row) / p.num_q_heads;
    const int end_row = min_of((token + 1) * p.num_q_heads - piece.first_row, piece.num_rows);
    const uint64_t bits = visible_bits(p, piece.request, length, token, first_key);
    any |= bits;
    all &= bits;
    for (; row < end_row; ++row) tile.visible[row] = bits;
  }
  tile.all_visible = all == ~uint64_t{0};
  return any;
}

// Tokens of a request, as far as its table goes; the op has recorded what lies beyond.
int length_within_table(const Params& p, int request) {
  if (p.selects) return keys_of_request(p, request);
  return min_of(max_of(p.cache_seqlens[request], 0), p.page_table.num_tokens(request));
}

bool page_is_good(const Params& p, int request, int cell, int64_t page) {
  if (page >= 0 && page < p.page_table.num_pages) return true;
  record_fault(p.report, {.op = ReportOp::kMlaDecode,
                          .kind = ReportKind::kPageIndex,
                          .request = request,
                          .position = cell,
                          .value = page,
                          .limit = p.page_table.num_pages});
  return false;
}

template <typename T>
void write_row(const float* values, float factor, uint8_t* out) {
  T* typed = reinterpret_cast<T*>(out);
  for (int d = 0; d < kHeadDimV; ++d) typed[d] = attnops::cpu::from_float<T>(values[d] * factor);
}

void write_output(const Params& p, const RowPlace& place, const float* values, float lse) {
  const float factor = sink_factor(p, place.head, lse);
  switch (p.dtype) {
    case DType::kFloat16: write_row<attnops::cpu::Float16>(values, factor, place.out); break;
    case DType::kBFloat16: write_row<attnops::cpu::BFloat16>(values, factor, place.out); break;
    default: write_row<float>(values, factor, place.out); break;
  }
  if (p.lse) p.lse[place.lse] = lse;
}

// Merges `count` partial results of one plan row; the first lies at partial row `first`, the others one after another
// at distance `step` from `second` on.
void merge_row(const Params& p, const RowPlace& place, int row, int64_t first, int64_t second, int64_t step,
               int count) {
  const auto partial_row = [&](int i) { return (i == 0 ? first : second + (i - 1) * step) * kPlanRows + row; };
  float lse_max = -INFINITY;
  for (int i = 0; i < count; ++i) lse_max = fmaxf(lse_max, p.lse_partial[partial_row(i)]);
  float sum = 0.f;
  for (int i = 0; i < count && lse_max > -INFINITY; ++i) sum += expf(p.lse_partial[partial_row(i)] - lse_max);

  float merged[kHeadDimV] = {};
  for (int i = 0; i < count && sum != 0.f; ++i) {  // a NaN sum goes on: it must show
    const float weight = expf(p.lse_partial[partial_row(i)] - lse_max) / sum;
    if (weight == 0.f) continue;  // an empty split's row may hold anything
    const float* values = p.out_partial + partial_row(i) * kHeadDimV;
    for (int d = 0; d < kHeadDimV; ++d) merged[d] += weight * values[d];
  }
  write_output(p, place, merged, sum != 0.f ? lse_max + logf(sum) : -INFINITY);
}

// A block of a request's rows.
Piece rows_of_block(const Params& p, int request, int block) {
  const int first_row = block * kPlanRows;
  return {.request = request,
          .first_row = first_row,
          .num_rows = min_of(num_rows_of_request(p) - first_row, kPlanRows),
          .first_tile = 0,
          .num_tiles = 0,
          .partial = -1};
}

// The block of a work that part `part` does.
Piece rows_of_part(const Params& p, int work, int part) {
  const int blocks = p.division.blocks, works = blocks_per_request(p.seqlen_q, p.num_q_heads) / blocks;
  return rows_of_block(p, work / works, work % works * blocks + part % blocks);
}

// Runs the tiles [begin, end) of a work, counted from its first visible tile, cut where the mode asks for it.
void run_tiles(const Params& p, Piece piece, int begin, int end, int64_t balanced_slot, const Kernel& kernel) {
  const TileRange range = tiles_of(p, piece.request);
  const int within = ceil_div(length_within_table(p, piece.request), kPlanTileTokens) - range.first;
  const auto tiles_of_piece = [&](int from, int to) { return max_of(min_of(to, within) - from, 0); };
  if (p.fixed_split_tokens == 0) {
    piece.first_tile = range.first + begin;
    piece.num_tiles = tiles_of_piece(begin, end);
    piece.partial = balanced_slot;
    return kernel.run(p, piece, kernel.ops);
  }
  const int cut_tiles = p.fixed_split_tokens / kPlanTileTokens;
  const int cuts = fixed_cuts(p, piece.request);
  const int64_t first = first_cut(p, piece.request, piece.first_row / kPlanRows, cuts);
  if (cuts > 1 && first + cuts > p.num_partials) return;  // merge_fixed makes it seen
  for (int tile = begin; tile < end; tile += cut_tiles) {
    piece.first_tile = range.first + tile;
    piece.num_tiles = tiles_of_piece(tile, min_of(tile + cut_tiles, end));
    piece.partial = cuts > 1 ? first + tile / cut_tiles : -1;
    kernel.run(p, piece, kernel.ops);
  }
}

bool has_few_keys(const Params& p, int request) {
  int count = 0;
  for (const SelectedRows* rows : {&p.selected, &p.extra}) {
    const int length = rows->length(request);
    for (int i = 0; i < length && count <= kFewKeys; ++i) count += rows->has_row(rows->list(request)[i]) ? 1 : 0;
  }
  return count <= kFewKeys;
}

// The keys of the tile from `first_key` on that lists select.
KeyTile selected_tile(const Params& p, const Piece& piece, int first_key) {
  KeyTile tile;
  const ListKeys keys(p.selected, p.extra, piece.request);
  const bool is_extra = first_key >= keys.second;
  const SelectedRows& rows = is_extra ? p.extra : p.selected;
  const int begin = is_extra ? first_key - keys.second : first_key;
  const int count = min_of(rows.length(piece.request) - begin, kPlanTileTokens);
  const auto* pool = static_cast<const uint8_t*>(rows.pages);
  const int64_t size = size_of(p.kv_dtype);
  uint64_t seen = 0;
  for (int k = 0; k < kPlanTileTokens; ++k) {
    tile.key[k] = {nullptr, nullptr};
    const int index = k < count ? rows.list(piece.request)[begin + k] : -1;
    if (index < 0) continue;
    if (!rows.has_row(index)) {
      record_fault(p.report, {.op = p.report_op,
                              .kind = is_extra ? kReportExtraRowIndex : kReportRowIndex,
                              .request = piece.request,
                              .position = begin + k,
                              .value = index,
                              .limit = rows.num_rows});
      continue;
    }
    const int64_t page = index / rows.page_size, token = index % rows.page_size;
    const uint8_t* first = pool + page * rows.stride_page * size;
    const bool apart = p.shared_rows && p.kv_dtype == DType::kUInt8;
    tile.key[k].row = first + token * (apart ? kSharedDataBytes : rows.stride_token * size);
    if (apart) {
      tile.key[k].scales = first + int64_t{rows.page_size} * kSharedDataBytes + token * kSharedScaleBytes;
    }
    seen |= uint64_t{1} << k;
  }
  if (rounds_keys(p) && std::popcount(seen) <= kFewKeys && has_few_keys(p, piece.request)) {
    for (Key& key : tile.key) key.rounded = true;
  }
  for (int row = 0; row < piece.num_rows; ++row) tile.visible[row] = seen;
  tile.any_visible = seen != 0;
  tile.all_visible = seen == ~uint64_t{0};
  return tile;
}

}  // namespace

int keys_of_request(const Params& p, int request) {
  return p.selects ? ListKeys(p.selected, p.extra, request).end : p.cache_seqlens[request];
}

void run_whole(const Params& p, int request, int block, const Kernel& kernel) {
  Piece piece = rows_of_block(p, request, block);
  piece.num_tiles = tiles_of(p, request).count;
  kernel.run(p, piece, kernel.ops);
}

void run_part(const Params& p, int part, const Kernel& kernel) {
  const SplitKvEntry entry = entry_of(p, part);
  const int last_work = entry.end_tile > 0 ? entry.end_work : entry.end_work - 1;
  for (int work = entry.begin_work; work <= last_work; ++work) {
    const Piece piece = rows_of_part(p, work, part);
    const int begin = work == entry.begin_work ? entry.begin_tile : 0;
    const int end = work == entry.end_work ? entry.end_tile : tiles_of(p, piece.request).count;
    const bool first = work == entry.begin_work;
    const int num_splits = first ? entry.begin_num_splits : work == last_work ? entry.last_num_splits : 1;
    run_tiles(p, piece, begin, end, num_splits > 1 ? partial_slot(part, first) : -1, kernel);
  }
}

KeyTile key_tile(const Params& p, const Piece& piece, int tile_index) {
  static_assert(kPlanTileTokens == 64, "a row's mask is one word");
  const int first_key = tile_index * kPlanTileTokens;
  if (p.selects) return selected_tile(p, piece, first_key);
  KeyTile tile;
  const int length = max_of(p.cache_seqlens[piece.request], 0);
  const uint64_t asked = mask_tile(p, piece, length, first_key, tile);
  uint64_t seen = asked & bits_below(max_of(length_within_table(p, piece.request) - first_key, 0));

  const int64_t row_bytes = size_of(p.kv_dtype);
  const int page_size = p.page_table.page_size;
  const int32_t* cells = p.page_table.row(piece.request);
  int cell = first_key / page_size, offset = first_key % page_size;
  int known_cell = -1;  // the cell that `page` was read from: cells of unseen keys are not read
  int64_t page = 0;
  for (int k = 0; k < kPlanTileTokens; ++k) {
    tile.key[k] = {nullptr, nullptr};
    if (seen >> k & 1) {
      if (known_cell != cell) {
        page = cells[cell];
        known_cell = cell;
        if (!page_is_good(p, piece.request, cell, page)) page = -1;
      }
      if (page < 0) {
        seen &= ~(uint64_t{1} << k);
      } else {
        const int64_t element = page * p.kv_stride_page + offset * p.kv_stride_token;
        tile.key[k].row = static_cast<const uint8_t*>(p.kv_pages) + element * row_bytes;
      }
    }
    if (++offset == page_size) {
      offset = 0;
      ++cell;
    }
  }
  if (seen != asked) {
    for (int row = 0; row < piece.num_rows; ++row) tile.visible[row] &= seen;
    tile.all_visible = false;
  }
  tile.any_visible = seen != 0;
  return tile;
}

RowPlace row_place(const Params& p, const Piece& piece, int i) {
  const int64_t request = piece.request;
  const int token = (piece.first_row + i) / p.num_q_heads, head = (piece.first_row + i) % p.num_q_heads;
  const int bytes = size_of(p.dtype);
  const auto* q = static_cast<const uint8_t*>(p.q) +
                  bytes * (request * p.q_stride_request + token * p.q_stride_token + head * p.q_stride_head);
  const auto* q_pe =
      static_cast<const uint8_t*>(p.q_pe) +
      bytes * (request * p.q_pe_stride_request + token * p.q_pe_stride_token + head * p.q_pe_stride_head);
  return {.q = q,
          .q_pe = p.q_pe ? q_pe : q + kHeadDimV * bytes,
          .out = static_cast<uint8_t*>(p.out) +
                 bytes * (request * p.out_stride_request + token * p.out_stride_token + head * p.out_stride_head),
          .lse = (request * p.seqlen_q + token) * p.num_q_heads + head,
          .head = head};
}

float sink_factor(const Params& p, int head, float lse) {
  if (p.sinks == nullptr || lse == -INFINITY) return 1.f;
  return 1.f / (1.f + expf(p.sinks[head] - lse));
}

void store_row(const Params& p, const Piece& piece, int i, const float* values, float lse) {
  if (piece.partial < 0) return write_output(p, row_place(p, piece, i), values, lse);
  const int64_t row = piece.partial * kPlanRows + i;
  std::memcpy(p.out_partial + row * kHeadDimV, values, kHeadDimV * sizeof(float));
  p.lse_partial[row] = lse;
}

void merge_balanced(const Params& p, int part, int row) {
  const SplitKvEntry entry = entry_of(p, part);
  const int last_work = entry.end_tile > 0 ? entry.end_work : entry.end_work - 1;
  if (last_work < entry.begin_work) return;
  // Only the last work of a part can begin here and end elsewhere.
  const bool only_one = last_work == entry.begin_work;
  if (entry.last_num_splits <= 1 || (only_one && entry.begin_split != 0)) return;
  const Piece piece = rows_of_part(p, last_work, part);
  if (row >= piece.num_rows) return;
  const int next = p.division.blocks;  // parts to the one that has the next split of this block
  merge_row(p, row_place(p, piece, row), row, partial_slot(part, only_one), partial_slot(part + next, true), 2 * next,
            entry.last_num_splits);
}

void merge_fixed(const Params& p, int request, int row) {
  const int cuts = fixed_cuts(p, request);
  if (cuts <= 1) return;
  const int block = row / kPlanRows;
  const Piece piece = rows_of_block(p, request, block);
  const RowPlace place = row_place(p, piece, row % kPlanRows);
  const int64_t first = first_cut(p, request, block, cuts);
  if (first + cuts <= p.num_partials) {
    merge_row(p, place, row % kPlanRows, first, first + 1, 1, cuts);
    return;
  }
  // More cuts than the caller has room for: nothing was computed, and that must not pass for an answer.
  record_fault(p.report, {.op = p.selects ? p.report_op : ReportOp::kMlaDecode,
                          .kind = ReportKind::kLength,
                          .request = request,
                          .position = 0,
                          .value = first + cuts,
                          .limit = p.num_partials + 1});
  float nan[kHeadDimV];
  for (float& value : nan) value = NAN;
  write_output(p, place, nan, NAN);
}

}  // namespace attnops::mla_decode::cpu
