#pragma once
#include "core/report.h"
#include "device/common/tree_rows.cuh"
#include "mla_decode/params.h"
#include "mla_decode/plan.h"
#include "scheduler/split_kv_bounds.h"

namespace attnops::mla_decode::sm90 {

// What a kernel is compiled for: all that the op offers, or only what most calls ask: no soft cap, window, tree mask,
// sinks or checked mode, a positive scale, queries that the copy engine can fetch and an aligned output. Code that is
// only jumped over is not free: a short call runs everything once, at the speed of instruction fetches.
// kSelected is lists of rows instead of pages, with sinks and the checked mode, but for the rest as kCommon. kMasked is
// the same where groups of heads see parts of a list (HeadMasks).
enum class Options { kAll, kCommon, kSelected, kMasked };

constexpr bool selects(Options options) { return options == Options::kSelected || options == Options::kMasked; }

// Whether the kernel for many rows passes works without keys over. Its loaders write their zeros.
template <Options kOptions>
inline constexpr bool kPassesKeyless = kOptions == Options::kCommon;

template <Options kOptions>
__device__ inline int window_of(const Params& p) {
  return kOptions == Options::kAll ? p.window_left : -1;
}

// A run of KV tiles of one work: what is computed into one accumulator. Tile t holds the request's keys
// [64 t, 64 t + 64).
struct Piece {
  int request, first_row, num_rows;  // query rows (token, head) of the request, token-major
  int length;                        // tokens of the request
  KvRange keys;                      // what may be read: visible to some query and within the page table
  int first_tile, num_tiles;
  int partial;  // row of out_partial, or -1: the only piece of its work
};

__device__ inline int blocks_of_request(const Params& p) { return blocks_per_request(p.seqlen_q, p.num_q_heads); }

// The group of this part, and which block of its works the part does.
__device__ inline int group_of_part(const Params& p) {
  return p.division.by_blocks.divide(static_cast<int>(blockIdx.x));
}
__device__ inline int block_in_work(const Params& p) {
  return static_cast<int>(blockIdx.x) - group_of_part(p) * p.division.blocks;
}

// A block of a request, by its work and the part that does it. Divisions would be most of what there is to compute
// before the first load.
struct BlockPlace {
  int request, block;
};

__device__ inline BlockPlace block_place(const Params& p, int work) {
  const int request = p.division.by_works.divide(work);
  return {request, work * p.division.blocks - request * blocks_of_request(p) + block_in_work(p)};
}

__device__ inline TileRange tiles_of(const Params& p, int length) {
  return visible_tiles(length, p.seqlen_q, p.window_left, kPlanTileTokens);
}

// First partial row of a block's cuts in batch-invariant mode.
__device__ inline int64_t first_cut(const Params& p, int request, int block, int cuts) {
  return static_cast<int64_t>(p.num_splits[request]) * blocks_of_request(p) + static_cast<int64_t>(block) * cuts;
}

// Whether a block's cuts find their rows among the partial results.
__device__ inline bool has_room(const Params& p, int64_t first, int cuts) {
  return first >= 0 && first + cuts <= p.num_partials;
}

// A row of the plan.
__device__ inline SplitKvEntry entry_of(const Params& p, int part) {
  const SplitKvEntry entry = reinterpret_cast<const SplitKvEntry*>(p.tile_scheduler_metadata)[part];
  const WorkDivision& division = p.division;
  const SplitKvExtent plan{p.batch_size * division.works, division.groups, p.fixed_split_tokens == 0};
  return bounded(entry, plan, division.by_blocks.divide(part));
}

// The same. Lists without a plan are dealt out whole, as many works to each group of parts.
template <Options kOptions>
__device__ inline SplitKvEntry entry_for(const Params& p, int part) {
  if (!selects(kOptions) || p.tile_scheduler_metadata) return entry_of(p, part);
  const int blocks = p.division.blocks, groups = p.num_sm_parts / blocks, group = p.division.by_blocks.divide(part);
  const int64_t works = ListTurn(p).is_own() ? int64_t{p.batch_size} * (blocks_of_request(p) / blocks) : 0;
  const auto first_of = [&](int g) { return static_cast<int32_t>(works * g / groups); };
  return {first_of(group), 0, first_of(group + 1), 0, 0, 1, 1, 0};
}

// Keys of a request, as the plan counts them.
template <Options kOptions>
__device__ inline int keys_of(const Params& p, int request) {
  return selects(kOptions) ? ListKeys(p.selected, p.extra, request).end : p.cache_seqlens[request];
}

// Less than begin_work where the part is idle, which it may also be inside a work: a batch-invariant plan's part can be
// smaller than a cut.
__device__ inline int last_work_of(const SplitKvEntry& entry) {
  const int first_tile = entry.begin_work == entry.end_work ? entry.begin_tile : 0;  // of end_work that it may have
  return entry.end_tile > first_tile ? entry.end_work : entry.end_work - 1;
}

// Where this part puts its piece of a work in balanced mode; -1: it has all of it. Of the works that a part shares, one
// began in an earlier part and one goes on in the next.
__device__ inline int balanced_partial(const SplitKvEntry& entry, int work) {
  const bool is_first = work == entry.begin_work;
  const int splits = is_first ? entry.begin_num_splits : work == last_work_of(entry) ? entry.last_num_splits : 1;
  return splits > 1 ? partial_slot(blockIdx.x, is_first && entry.begin_split > 0) : -1;
}

// What CTA `number` of a short call (Params::list_cuts) has to do, of blocks of kRows heads: the host has set
// p.division for it. This much is known without a list's length, the rest of ShortPiece is not.
template <int kRows>
struct ShortBlock {
  int request, first_row, cut;  // the first row of the request; which piece of the block's

  __device__ ShortBlock(const Params& p, int number) {
    const int work = p.division.by_blocks.divide(number);
    cut = number - work * p.list_cuts;
    request = p.division.by_works.divide(work);
    first_row = (work - request * p.division.works) * kRows;
  }
  __device__ int num_rows(const Params& p) const { return min_of(p.num_q_heads - first_row, kRows); }
};

template <int kRows>
struct ShortPiece : ShortBlock<kRows> {
  ListKeys keys;
  int tiles, cuts;  // of the work; there is no piece where `cut` is not below

  __device__ ShortPiece(const Params& p, const ShortBlock<kRows>& block)
      : ShortBlock<kRows>(block), keys(p.selected, p.extra, block.request) {
    tiles = max_of(ceil_div(keys.end, kPlanTileTokens), 1);
    cuts = min_of(p.list_cuts, tiles);
  }
  __device__ ShortPiece(const Params& p, int number) : ShortPiece(p, ShortBlock<kRows>(p, number)) {}
};

// Describes the rows of a block and their keys. Returns the tiles of the whole work.
template <Options kOptions>
__device__ inline TileRange describe_work(const Params& p, const BlockPlace& place, int cache_seqlen, Piece& piece) {
  piece.request = place.request;
  piece.first_row = place.block * kPlanRows;
  piece.num_rows = min_of(p.seqlen_q * p.num_q_heads - piece.first_row, kPlanRows);
  piece.length = length_of(cache_seqlen);
  piece.keys = visible_keys(piece.length, p.seqlen_q, window_of<kOptions>(p));
  piece.keys.end = min_of(piece.keys.end, p.page_table.num_tokens(piece.request));
  return visible_tiles(piece.length, p.seqlen_q, window_of<kOptions>(p), kPlanTileTokens);
}

// How many of `tiles` from the piece's first on are worth a look: not those beyond the page table, but one at least,
// for somebody must write zeros. So a piece beyond the work's tiles, which no planner makes, is one tile without keys.
__device__ inline int tiles_in_table(const Piece& piece, int tiles) {
  return max_of(min_of(tiles, ceil_div(piece.keys.end, kPlanTileTokens) - piece.first_tile), 1);
}

// Whether a key may be read: it is in the page table, and some row of the request sees it.
template <Options kOptions = Options::kAll>
__device__ inline bool is_readable(const Params& p, const Piece& piece, int key) {
  if (key < piece.keys.begin || key >= piece.keys.end) return false;
  if (kOptions == Options::kCommon || p.tree_mask == nullptr) return true;
  const int draft = key - (piece.length - p.tree_keys);
  return draft < 0 || some_row_sees(TreeRules(p), piece.request, draft);
}

// Checked mode: a length beyond the page table, by one lane.
__device__ inline void check_table_length(const Params& p, const Piece& piece) {
  const int64_t capacity = p.page_table.num_cells(piece.request) * p.page_table.page_size;
  if (piece.length <= capacity) return;
  record_fault(p.report, {ReportOp::kMlaDecode, ReportKind::kLength, piece.request, 0, p.cache_seqlens[piece.request],
                          capacity + 1});
}

// Checked mode, of lists: by one lane.
__device__ inline void check_list_length(const Params& p, const Piece& piece, const SelectedRows& rows,
                                         ReportKind kind) {
  if (rows.lengths == nullptr || rows.lengths[piece.request] <= rows.count) return;
  record_fault(p.report, {p.report_op, kind, piece.request, 0, rows.lengths[piece.request], int64_t{rows.count} + 1});
}

__device__ inline void check_list_lengths(const Params& p, const Piece& piece) {
  check_list_length(p, piece, p.selected, kReportListLength);
  check_list_length(p, piece, p.extra, kReportExtraListLength);
}

// Walks what part blockIdx.x owns. Every warpgroup walks by itself and sees the same.
template <Options kOptions>
class PieceWalkFor {
 public:
  __device__ explicit PieceWalkFor(const SplitKvEntry& entry)
      : entry_(entry), work_(entry.begin_work), tile_(entry.begin_tile) {}

  __device__ bool next(const Params& p, Piece& piece) {
    return next(p, piece, [] { return false; });
  }

  // passes() says whether works of requests without keys are passed over, but for the first of the part, whose queries
  // may be asked for; somebody writes their zeros then. Batch-invariant plans have all works.
  template <class Passes>
  __device__ bool next(const Params& p, Piece& piece, const Passes& passes) {
    const SplitKvEntry& entry = entry_;
    const int last_work = last_work_of(entry);
    while (work_ <= last_work) {
      const BlockPlace place = block_place(p, work_);
      const TileRange range = describe_work<kOptions>(p, place, keys_of<kOptions>(p, place.request), piece);
      const int end = work_ == entry.end_work ? entry.end_tile : range.count;
      const int begin = tile_;
      piece.first_tile = range.first + begin;
      if (p.fixed_split_tokens == 0) {
        piece.num_tiles = tiles_in_table(piece, end - begin);
        piece.partial = balanced_partial(entry, work_);
        const bool may_pass = piece.length == 0 && work_ != entry.begin_work && piece.partial < 0;
        advance();
        if (may_pass && passes()) continue;
        return true;
      }
      const int cut_tiles = p.fixed_split_tokens / kPlanTileTokens;
      const int cuts = ceil_div(range.count, cut_tiles);
      const int64_t first = first_cut(p, piece.request, place.block, cuts);
      piece.num_tiles = tiles_in_table(piece, min_of(cut_tiles, end - begin));
      piece.partial = cuts > 1 ? static_cast<int>(first + min_of(begin / cut_tiles, cuts - 1)) : -1;
      tile_ += cut_tiles;
      if (tile_ >= min_of(end, range.count)) advance();
      if (cuts == 1 || has_room(p, first, cuts)) return true;
      // More cuts than the caller has room for: the merge makes it seen.
    }
    return false;
  }

 private:
  __device__ void advance() {
    ++work_;
    tile_ = 0;
  }

  const SplitKvEntry& entry_;
  int work_, tile_;
};

using PieceWalk = PieceWalkFor<Options::kAll>;

// Where tiles end that come as boxes: of the drafts of a tree some may be seen by no row.
template <Options kOptions = Options::kAll>
__device__ inline int boxes_end(const Params& p, const Piece& piece) {
  if (kOptions == Options::kCommon || p.tree_mask == nullptr) return piece.keys.end;
  return min_of(piece.keys.end, piece.length - p.tree_keys);
}

// Whether a tile comes as boxes by the copy engine, or row by row: it does when nothing in it is unreadable.
template <Options kOptions = Options::kAll>
__device__ inline bool is_boxed(const Params& p, const Piece& piece, int tile, bool use_boxes) {
  const int first_key = tile * kPlanTileTokens;
  return use_boxes && first_key >= piece.keys.begin && first_key + kPlanTileTokens <= boxes_end<kOptions>(p, piece);
}

// A query row of a request.
struct RowPlace {
  int token, head;
};

__device__ inline RowPlace row_place(const Params& p, int row) {
  const int token = p.division.by_heads.divide(row);
  return {token, row - token * p.num_q_heads};
}

// Where a query row begins: its latent part, and its rope part.
struct QueryPlace {
  const uint8_t *latent, *rope;
};

__device__ inline QueryPlace query_place(const Params& p, int request, const RowPlace& at) {
  constexpr int kElement = 2;
  const auto* latent =
      static_cast<const uint8_t*>(p.q) +
      kElement * (request * p.q_stride_request + at.token * p.q_stride_token + at.head * p.q_stride_head);
  if (p.q_pe == nullptr) return {latent, latent + kHeadDimV * kElement};
  return {latent, static_cast<const uint8_t*>(p.q_pe) +
                      kElement * (request * p.q_pe_stride_request + at.token * p.q_pe_stride_token +
                                  at.head * p.q_pe_stride_head)};
}

// What the output must be multiplied by for a sink; `lse` is the natural log and stays what it is.
__device__ inline float sink_factor(const Params& p, int head, float lse) {
  if (p.sinks == nullptr || lse == -INFINITY) return 1.f;
  return __fdividef(1.f, 1.f + __expf(p.sinks[head] - lse));
}

}  // namespace attnops::mla_decode::sm90
