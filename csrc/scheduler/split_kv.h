#pragma once
#include <cstdint>

#include "core/math.h"
#include "scheduler/split_kv_entry.h"

namespace attnops {

// Even division of a decode batch's KV tiles over a fixed number of SM parts, from the lengths alone.
//
// Every work w gets an interval [S(w), S(w + 1)) of a cost axis, of length overhead + kTileCost * num_tiles(w); part p
// gets the slice [p * C, (p + 1) * C) of that axis, C = budget. A coordinate is turned into a tile by `point_at`:
//
//     cost   S(w)        S(w)+o      +U        +2U               S(w+1)
//            |-- overhead --|---------|---------|------ ... -------|
//     point  (w,0)          (w,0)   (w,1)     (w,2)              (w+1,0)
//            coordinates in (S(w)+o+(t-1)U, S(w)+o+tU] map to (w,t);  U = kTileCost * tiles per step
//
// Invariants, tested on random, adversarial and skewed batches:
//  1. Each step of each work belongs to exactly one part. Proof: point_at is monotone in the coordinate, point_at(0) is
//     the first point and point_at(total) the end; so the parts [point_at(pC), point_at((p+1)C)) tile the order.
//  2. Step (w, t) is in part floor((S(w) + o + tU) / C). Proof: point_at(x) <= (w, t) iff x <= S(w) + o + tU.
//  3. Balanced mode: the parts between the first and the last of a work hold at least one tile each, so its splits
//     are numbered without gaps. Proof: C >= U, and a slice of length >= U inside the work covers a multiple of U.
//  4. No part holds more than ceil(C / kTileCost) tiles in balanced mode, and a work without overhead at most
//     C / kTileCost; and two tiles more where pieces have a least size. Where works stay whole it is C and a work.
//
// In balanced mode a point that would leave a piece of fewer than `least_piece` tiles moves to the work's end nearby: a
// piece costs more than its tiles. So (w, t) with t below that becomes (w, 0), one as near to the end (w + 1, 0).
// Where `short_tiles` is not 0, the planner looks whether cuts are worth their merge (`most_whole_tiles`). If not,
// works stay whole. Works that outnumber the shares are then dealt out by cost, each to the share that its last tile
// falls into; any others have a share each. And works of one length that the shares hold twice are cut into `cuts`
// equal pieces, a share each, where that costs no more than second pieces of shares do. Where `more_of_lone` is not 0,
// so are works of any lengths that are no more than the shares, those of more than `piece` tiles into as few pieces as
// have no more: the merge of a work waits for whoever ends last, and that is who has two pieces.
//
// Batch-invariant mode (fixed_split_tiles != 0): where a work is cut depends on nothing but its own tiles. It is cut
// every fixed_split_tiles of them, or, below zero, into at most so many cuts of even length (CutRule), so that a long
// request alone still spreads over a GPU. Parts take whole cuts, and every cut writes its own partial result, merged in
// order.

// Parts may come in groups (parts_per_group > 1): the tiles are then divided over the groups, and part p of the plan
// repeats the share of group p / parts_per_group. The parts of a group walk the same tiles of the same works side by
// side, each for its own rows of every work, so that what one of them reads the others find near. Everything below
// counts in groups where it says part.

inline constexpr int64_t kTileCost = 8;  // cost units per tile: the overhead may be a fraction of a tile

struct SplitKvGeometry {
  int num_requests;
  int works_per_request;
  int seqlen_q;             // query tokens per request
  int tile_tokens;          // KV tokens per tile
  int window_left;          // -1: no window
  int num_sm_parts;         // rows of the plan
  int work_overhead;        // cost units that every work pays besides its tiles, when works outnumber parts
  int fixed_split_tiles;    // 0: balanced; below 0: a CutRule
  int parts_per_group = 1;  // rows of the plan that one share takes, a divisor of num_sm_parts; see below
  int even_shares = 0;      // shares of a batch of works of one length, see below; 0: as many as there are
  int short_tiles = 0;      // 0 or 2: works of no more tiles stay whole in balanced mode, and see above
  bool uneven = false;      // found by the planner, where even_shares asks it to look: works differ in length
  bool whole = false;       // found by the planner, where short_tiles asks it to look: no work is cut
  int cuts = 0;             // so found: share s has piece s % cuts of work s / cuts; 0: shares are by cost
  int dealt_works = 0;      // of each part, from which on parts may take them in an order, see below; 0: never
  int whole_overhead = 0;   // of work_overhead, at most, where it is decided whether works stay whole; 0: all of it
  int more_of_lone = 0;     // tiles that a share may have more than its budget for having one piece, up to half of it
  int piece = 0;            // found by the planner: tiles of the longest piece, if shares have one each
};

// What a length in a tensor counts as: one beyond any cache must not overflow what is computed from it.
inline constexpr int kMostCacheTokens = 1 << 28;
ATTNOPS_HOST_DEVICE inline int length_of(int cache_seqlen) { return min_of(max_of(cache_seqlen, 0), kMostCacheTokens); }

// Tokens of the cache that at least one query of the request may see: [begin, end).
struct KvRange {
  int begin, end;
};

ATTNOPS_HOST_DEVICE inline KvRange visible_keys(int cache_seqlen, int seqlen_q, int window_left) {
  const int length = length_of(cache_seqlen);
  if (window_left < 0) return {0, length};
  return {max_of(length - seqlen_q - window_left, 0), length};
}

// First tile that is visited, and how many. A request without keys still has one tile: somebody must write its
// zeros.
struct TileRange {
  int first, count;
};

ATTNOPS_HOST_DEVICE inline TileRange tiles_over(const KvRange& keys, int tile_tokens) {
  const int first = keys.begin / tile_tokens;
  return {first, max_of(ceil_div(keys.end, tile_tokens) - first, 1)};
}

ATTNOPS_HOST_DEVICE inline TileRange visible_tiles(int cache_seqlen, int seqlen_q, int window_left, int tile_tokens) {
  return tiles_over(visible_keys(cache_seqlen, seqlen_q, window_left), tile_tokens);
}

ATTNOPS_HOST_DEVICE inline int num_tiles(const SplitKvGeometry& g, int cache_seqlen) {
  return visible_tiles(cache_seqlen, g.seqlen_q, g.window_left, g.tile_tokens).count;
}

// The entry of `num_splits` before which there are so many cuts. Beyond what it holds there is no room for any.
ATTNOPS_HOST_DEVICE inline int32_t splits_before(int64_t cuts) {
  return static_cast<int32_t>(min_of(cuts, int64_t{INT32_MAX}));
}

// How many shares there are.
ATTNOPS_HOST_DEVICE inline int num_groups(const SplitKvGeometry& g) { return g.num_sm_parts / g.parts_per_group; }

// The ops' argument, in tiles: a number of cuts stays what it is.
ATTNOPS_HOST_DEVICE inline int fixed_split_tiles(int fixed_split_tokens, int tile_tokens) {
  return fixed_split_tokens > 0 ? fixed_split_tokens / tile_tokens : fixed_split_tokens;
}

// More cuts of a work than this are worth nothing, and their partial results would fill a GPU.
inline constexpr int kMaxCuts = 1024;
inline constexpr int kMaxLeastCut = 64;  // tiles

// What a number of tiles or tokens below zero means: at most `most` cuts of a work, none of fewer than `least` tiles.
// It is -(most + kMaxCuts * least), least 0 where every tile may be a cut.
struct CutRule {
  int most, least;

  ATTNOPS_HOST_DEVICE explicit CutRule(int fixed_split_tiles)
      : most((-fixed_split_tiles - 1) % kMaxCuts + 1), least((-fixed_split_tiles - 1) / kMaxCuts) {}
};

// Few cuts of a work have an even number of tiles, where the work's tiles decide: a single tile is hardly worth its
// partial result. Many are for kernels that add neighbours up where they are (xqa_decode/sm90/fold.cuh).
inline constexpr int kFewCuts = 16;

// Tiles from one cut of a work to the next in batch-invariant mode.
ATTNOPS_HOST_DEVICE inline int tiles_per_cut(int fixed_split_tiles, int tiles) {
  if (fixed_split_tiles > 0) return fixed_split_tiles;
  const CutRule rule(fixed_split_tiles);
  const int even = ceil_div(tiles, rule.most);
  return max_of(rule.most <= kFewCuts ? round_up(even, 2) : even, rule.least);
}

// Tiles of a step, which parts take whole.
ATTNOPS_HOST_DEVICE inline int tiles_per_step(const SplitKvGeometry& g, int tiles) {
  return g.fixed_split_tiles == 0 ? 1 : tiles_per_cut(g.fixed_split_tiles, tiles);
}

// Cuts of one work in batch-invariant mode.
ATTNOPS_HOST_DEVICE inline int num_fixed_splits(const SplitKvGeometry& g, int tiles) {
  return g.fixed_split_tiles == 0 ? 0 : ceil_div(tiles, tiles_per_cut(g.fixed_split_tiles, tiles));
}

// Shares that leave the works of an even batch whole, or cut each into as many: a few fewer than there are, if so.
inline int shares_of_even_works(int64_t works, int groups) {
  for (int shares = groups; shares > groups - groups / 10; --shares) {
    if (works > 0 && (works % shares == 0 || shares % works == 0)) return shares;
  }
  return groups;
}

// Shares of this batch; rows of the plan beyond them are empty.
ATTNOPS_HOST_DEVICE inline int num_shares(const SplitKvGeometry& g) {
  return g.even_shares > 0 && !g.uneven ? min_of(g.even_shares, num_groups(g)) : num_groups(g);
}

// Works that fit the parts one to one need no overhead term, and leaving it out keeps whole tiles per part. Where their
// lengths are known to differ they do not fit.
ATTNOPS_HOST_DEVICE inline int64_t overhead_cost(const SplitKvGeometry& g) {
  const bool fits = static_cast<int64_t>(g.num_requests) * g.works_per_request <= num_groups(g);
  return fits && !g.uneven ? 0 : g.work_overhead;
}

ATTNOPS_HOST_DEVICE inline int64_t work_cost(const SplitKvGeometry& g, int tiles) {
  return overhead_cost(g) + kTileCost * tiles;
}

// The budget C of every part, from the cost of the whole batch: whole tiles when there is no overhead. It may be less
// than a cut in batch-invariant mode: short requests then spread over all parts all the same.
ATTNOPS_HOST_DEVICE inline int64_t part_budget(const SplitKvGeometry& g, int64_t total_cost) {
  const int64_t least = kTileCost;
  const int64_t even = max_of(ceil_div(total_cost, static_cast<int64_t>(num_shares(g))), least);
  return overhead_cost(g) == 0 ? round_up(even, kTileCost) : even;
}

// Tiles of the smallest piece in balanced mode, at most half of what a part has; or of all works, if they are short.
ATTNOPS_HOST_DEVICE inline int least_piece(const SplitKvGeometry& g, int64_t budget) {
  constexpr int kLeastPiece = 2;
  if (g.whole) return kMostCacheTokens;
  return g.fixed_split_tiles == 0 && budget >= 2 * kLeastPiece * kTileCost ? kLeastPiece : 1;
}

ATTNOPS_HOST_DEVICE inline int num_works(const SplitKvGeometry& g) { return g.num_requests * g.works_per_request; }

// What shares pay where works are cut, in cost units: a second piece, and the merge behind all of them.
inline constexpr int kSecondPieceCost = 2 * kTileCost, kCutsCost = 4 * kTileCost;

// The overhead by which it is decided whether works stay whole: shares by cost may count more.
ATTNOPS_HOST_DEVICE inline int64_t overhead_of_whole(const SplitKvGeometry& g) {
  return g.whole_overhead > 0 ? min_of(overhead_cost(g), int64_t{g.whole_overhead}) : overhead_cost(g);
}

// Works of no more tiles than this all stay whole, by the cost of the batch. A thread of the planner looks for longer
// ones.
ATTNOPS_HOST_DEVICE inline int most_whole_tiles(const SplitKvGeometry& g, int64_t budget) {
  if (g.short_tiles == 0 || g.fixed_split_tiles != 0) return 0;
  const int works = num_works(g), shares = num_shares(g);
  const bool even = g.even_shares > 0 && !g.uneven;
  const int64_t overhead = overhead_cost(g);
  int64_t most;
  if (works > shares) {
    const int idle = ceil_div(works, shares) * shares - works;  // works that would fit beside, if they are even
    const int work = !even ? kCutsCost + kTileCost : idle > 0 ? kCutsCost * shares / idle : INT32_MAX;
    most = (work - overhead_of_whole(g)) / kTileCost;
  } else if (works * 2 > shares) {
    most = (budget - overhead + kCutsCost) / kTileCost;
  } else if (!even) {
    most = (budget - overhead + kCutsCost - kSecondPieceCost) / kTileCost;  // few shares have pieces of two works
  } else {
    most = works * 3 > shares ? 3 : 2;  // cut into equal pieces, one a share
  }
  return static_cast<int>(max_of(min_of(most, int64_t{kMostCacheTokens}), int64_t{g.short_tiles}));
}

// The pieces of each work that shares are made of, one a share, or 0; `whole` and the tiles of the first request are
// known.
ATTNOPS_HOST_DEVICE inline int cuts_of_works(const SplitKvGeometry& g, int64_t budget, int first_tiles) {
  const int works = num_works(g), shares = num_shares(g);
  if (g.short_tiles == 0 || g.fixed_split_tiles != 0 || works > shares || works == 0) return 0;
  if (g.whole) return 1;
  if (g.even_shares == 0 || g.uneven || works * 2 > shares) return 0;
  const int cuts = min_of(shares / works, first_tiles);
  const int64_t piece = kTileCost * ceil_div(first_tiles, cuts);
  return piece <= budget + kSecondPieceCost ? cuts : 0;
}

// The most tiles of a piece, where every share has one piece at most; 0 where that is not so. `whole` and `cuts` are
// known. `pieces` says how many all works would have of so many tiles.
template <class Pieces>
ATTNOPS_HOST_DEVICE int longest_piece(const SplitKvGeometry& g, int64_t total_tiles, const Pieces& pieces) {
  const int shares = num_shares(g);
  if (g.more_of_lone == 0 || g.fixed_split_tiles != 0 || g.whole || g.cuts > 0 || num_works(g) > shares) return 0;
  if (total_tiles <= shares) return 0;  // by cost they have a tile each
  int low = static_cast<int>(ceil_div(total_tiles, int64_t{shares}));
  int high = low + min_of(g.more_of_lone, low / 2);
  if (pieces(high) > shares) return 0;
  while (low < high) {
    const int middle = (low + high) / 2;
    if (pieces(middle) <= shares) {
      high = middle;
    } else {
      low = middle + 1;
    }
  }
  return high;
}

// Whether parts may take works whole instead, the longest first, each when it has time for one: there are many, and
// none is longer than a part. `num_splits` then holds the requests in that order, and behind them one more than the
// number of those that have more than kShortWorkTiles; less than zero where all have as many tiles. The rows are what
// they are: kernels that do not take works follow them.
inline constexpr int kMostDealtRequests = 1024, kShortWorkTiles = 2;

ATTNOPS_HOST_DEVICE inline bool deals_works(const SplitKvGeometry& g, int64_t budget, int longest) {
  if (g.dealt_works == 0 || g.fixed_split_tiles != 0 || g.num_requests > kMostDealtRequests) return false;
  const int64_t works = int64_t{g.num_requests} * g.works_per_request * g.parts_per_group;
  const int64_t more = (overhead_cost(g) - overhead_of_whole(g)) * num_works(g) / num_shares(g);  // in the budget
  return works > 0 && works >= int64_t{g.dealt_works} * g.num_sm_parts && kTileCost * longest <= budget - more;
}

ATTNOPS_HOST_DEVICE inline int dealt_word(int longer, bool even) { return even ? -1 - longer : 1 + longer; }

// Requests are put in order by classes of lengths, a quarter apart, the longest last; within one they stay as they are.
inline constexpr int kDealtClasses = 32;

ATTNOPS_HOST_DEVICE inline int dealt_class(int tiles) {
  int octave = 0;
  while (tiles >> octave > 7) ++octave;
  return min_of(4 * octave + (tiles >> octave), kDealtClasses - 1);
}

struct SplitKvPoint {
  int work, tile;
};

// `prefix` is int64 [num_requests + 1]: cost of all works of the requests before b, or their pieces, if shares have one
// each. `tiles` is int32 [num_requests].
struct SplitKvBatch {
  const int64_t* prefix;
  const int32_t* tiles;
};

// Largest request b with prefix[b] <= cost; cost must be below prefix[num_requests].
ATTNOPS_HOST_DEVICE inline int request_at(const SplitKvGeometry& g, const SplitKvBatch& batch, int64_t cost) {
  int low = 0, high = g.num_requests;  // prefix[low] <= cost < prefix[high]
  while (high - low > 1) {
    const int middle = (low + high) / 2;
    (batch.prefix[middle] <= cost ? low : high) = middle;
  }
  return low;
}

ATTNOPS_HOST_DEVICE inline SplitKvPoint point_at(const SplitKvGeometry& g, const SplitKvBatch& batch, int64_t cost,
                                                 int least) {
  const int64_t total = batch.prefix[g.num_requests];
  if (cost >= total) return {g.num_requests * g.works_per_request, 0};
  const int request = request_at(g, batch, cost);
  const int64_t each = work_cost(g, batch.tiles[request]);
  const int64_t inside = cost - batch.prefix[request];
  const int work = request * g.works_per_request + static_cast<int>(inside / each);
  const int64_t past_overhead = max_of(inside % each - overhead_cost(g), static_cast<int64_t>(0));
  const int step_tiles = tiles_per_step(g, batch.tiles[request]);
  const int64_t tile = ceil_div(past_overhead, kTileCost * step_tiles) * step_tiles;
  if (tile < min_of(least, batch.tiles[request])) return {work, 0};
  if (tile > batch.tiles[request] - least) return {work + 1, 0};
  return {work, static_cast<int>(tile)};
}

// Where a share begins; behind the last, where the works end.
ATTNOPS_HOST_DEVICE inline SplitKvPoint share_begin(const SplitKvGeometry& g, const SplitKvBatch& batch, int64_t budget,
                                                    int share) {
  if (g.piece > 0) {
    if (share >= batch.prefix[g.num_requests]) return {num_works(g), 0};
    const int request = request_at(g, batch, share), tiles = batch.tiles[request];
    const int pieces = ceil_div(tiles, g.piece), inside = share - static_cast<int>(batch.prefix[request]);
    const int work = inside / pieces, piece = inside - work * pieces, even = tiles / pieces;
    // The first pieces have one more.
    return {request * g.works_per_request + work, piece * even + min_of(piece, tiles - pieces * even)};
  }
  if (g.cuts == 0) return point_at(g, batch, share * budget, least_piece(g, budget));
  const int work = share / g.cuts, cut = share - work * g.cuts;
  if (work >= num_works(g)) return {num_works(g), 0};
  return {work, cut == 0 ? 0 : static_cast<int>(int64_t{batch.tiles[0]} * cut / g.cuts)};
}

// Coordinate of a tile that starts a step.
ATTNOPS_HOST_DEVICE inline int64_t cost_at(const SplitKvGeometry& g, const SplitKvBatch& batch, SplitKvPoint point) {
  const int request = point.work / g.works_per_request;
  const int64_t each = work_cost(g, batch.tiles[request]);
  return batch.prefix[request] + (point.work % g.works_per_request) * each + overhead_cost(g) + kTileCost * point.tile;
}

struct SplitKvSpan {
  int first_part, num_splits;
};

// Which parts share a work (balanced), or into how many it is cut (batch-invariant).
ATTNOPS_HOST_DEVICE inline SplitKvSpan work_span(const SplitKvGeometry& g, const SplitKvBatch& batch, int64_t budget,
                                                 int work) {
  if (g.cuts > 0) return {work * g.cuts, g.cuts};
  const int request = work / g.works_per_request, tiles = batch.tiles[request];
  if (g.piece > 0) {
    const int pieces = ceil_div(tiles, g.piece);
    return {static_cast<int>(batch.prefix[request]) + work % g.works_per_request * pieces, pieces};
  }
  const int least = least_piece(g, budget);
  const int first = static_cast<int>(cost_at(g, batch, {work, min_of(least, tiles) - 1}) / budget);
  if (g.fixed_split_tiles != 0) return {first, num_fixed_splits(g, tiles)};
  if (tiles < 2 * least) return {first, 1};
  const int last = static_cast<int>(cost_at(g, batch, {work, tiles - least}) / budget);
  return {first, last - first + 1};
}

// The share `part`, from where its slice begins and ends.
ATTNOPS_HOST_DEVICE inline SplitKvEntry split_kv_entry(const SplitKvGeometry& g, const SplitKvBatch& batch,
                                                       int64_t budget, int part, SplitKvPoint begin, SplitKvPoint end) {
  SplitKvEntry entry{begin.work, begin.tile, end.work, end.tile, 0, 0, 0, part};
  if (begin.work == end.work && begin.tile == end.tile) return entry;
  const int last_work = end.tile > 0 ? end.work : end.work - 1;
  const SplitKvSpan span = work_span(g, batch, budget, begin.work);
  const int begin_tiles = g.fixed_split_tiles == 0 ? 0 : batch.tiles[begin.work / g.works_per_request];
  entry.begin_split =
      g.fixed_split_tiles == 0 ? part - span.first_part : begin.tile / tiles_per_cut(g.fixed_split_tiles, begin_tiles);
  entry.begin_num_splits = span.num_splits;
  entry.last_num_splits = last_work == begin.work ? span.num_splits : work_span(g, batch, budget, last_work).num_splits;
  entry.first_part = span.first_part;
  return entry;
}

// Shares are independent of one another, so a GPU thread makes one each.
ATTNOPS_HOST_DEVICE inline SplitKvEntry split_kv_entry(const SplitKvGeometry& g, const SplitKvBatch& batch, int part) {
  const int64_t budget = part_budget(g, batch.prefix[g.num_requests]);
  return split_kv_entry(g, batch, budget, part, share_begin(g, batch, budget, part),
                        share_begin(g, batch, budget, part + 1));
}

// Where part `part` puts its piece of `work`, in balanced mode: at most the first and the last work of a part are
// shared with other parts, so two rows per part are enough and their numbers need no prefix sum.
ATTNOPS_HOST_DEVICE inline int partial_slot(int part, bool is_begin_work) { return 2 * part + (is_begin_work ? 0 : 1); }

}  // namespace attnops
