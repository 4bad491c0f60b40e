#pragma once
#include <cstdint>

#include "scheduler/split_kv.h"

namespace attnops {

// Plans whose shares are filled one after another, where works of several lengths outnumber the shares.
//
// Slices of the cost axis (split_kv.h) charge a work's overhead once. A share that begins inside a work pays it, too,
// and a share of whole works may have a work more than others. Here every share has the same budget for all that it
// does, and the least budget is looked for with which the shares are enough. Both with cuts and without: the merge
// behind cuts costs kMergeCost.
//
// A coordinate x = S(w) + U t is the place of tile t of work w, U = kTileCost. From there to the work's end it is
// overhead + U (tiles - t): what a share pays that begins there. So a share that begins at x ends at the last place
// up to x + budget that leaves no piece of fewer than kLeastFilled tiles.
//
// A work without keys counts as the overhead, without a tile: kernels that pass it over write zeros and load nothing.
// Rows of the plan do not tell, for such a work is never cut.
//
// A walk over all shares takes a step each, one behind the other, and the budgets are tried side by side. So the works
// are halved where half of the cost is, and both halves walk at the same time; the shares of the second follow those
// that the first took. Invariants 1 and 3 of split_kv.h hold, and no share costs more than the budget by its own count.
inline constexpr int kMostFilledShares = 132, kMostFilledRequests = 512;
inline constexpr int kMostFilledBudget = 480;  // cost units: longer shares gain little; and coordinates have 16 bits
inline constexpr int kFilledBudgets = 16;      // budgets that are tried, a tile apart
inline constexpr int kLeastFilled = 2;         // tiles of the smallest piece of a work that is cut, but at the half
inline constexpr int kFilledTile = static_cast<int>(kTileCost), kMergeCost = 2 * kFilledTile;
static_assert(kMostFilledShares * kMostFilledBudget < 1 << 16);

// What is known before the lengths are.
inline bool may_fill_shares(const SplitKvGeometry& g) {
  return g.fixed_split_tiles == 0 && g.short_tiles > 0 && g.work_overhead > 0 && g.even_shares > 0 &&
         num_groups(g) <= kMostFilledShares && g.num_requests <= kMostFilledRequests &&
         static_cast<int64_t>(g.num_requests) * g.works_per_request > num_groups(g);
}

// Tiles of one work of a request, as filled plans count them.
ATTNOPS_HOST_DEVICE inline int filled_tiles(const SplitKvGeometry& g, int cache_seqlen) {
  return cache_seqlen > 0 ? num_tiles(g, cache_seqlen) : 0;
}

// And with them: whether works differ so, and what all of them cost.
ATTNOPS_HOST_DEVICE inline bool fills_shares(const SplitKvGeometry& g, bool uneven, int64_t total) {
  return uneven && total <= int64_t{kMostFilledBudget} * num_groups(g);
}

// How shares are filled.
struct SplitKvFilling {
  int budget;
  bool cuts;
};

// The budgets that are tried, the least first: with less no share could have its part, or a cut would get nowhere.
ATTNOPS_HOST_DEVICE inline int filled_budget(const SplitKvGeometry& g, int total, int number) {
  const int least = static_cast<int>(overhead_cost(g)) + (2 * kLeastFilled - 1) * kFilledTile;
  return round_up(max_of(ceil_div(total, num_groups(g)), least), kFilledTile) + number * kFilledTile;
}

// Where a share ends that begins at `from`: there again where the work does not fit. `request` is that of a place up to
// `from` or a little behind, and moves on.
ATTNOPS_HOST_DEVICE inline int filled_end(const SplitKvGeometry& g, const SplitKvBatch& batch, SplitKvFilling filling,
                                          int from, int& request) {
  const int end = from + filling.budget;
  while (static_cast<int>(batch.prefix[request + 1]) <= end) ++request;
  const int tiles = batch.tiles[request], overhead = static_cast<int>(overhead_cost(g));
  const int begin = static_cast<int>(batch.prefix[request]), each = overhead + kFilledTile * tiles;
  const int start = g.works_per_request == 1 ? begin : begin + (end - begin) / each * each;
  if (!filling.cuts) return start;
  const int first = max_of(from - start, 0) / kFilledTile;  // of its tiles, that is not in the shares before
  const int tile = min_of(max_of(end - start - overhead, 0) / kFilledTile, tiles - kLeastFilled);
  return start + kFilledTile * (tile < first + kLeastFilled ? first : tile);
}

ATTNOPS_HOST_DEVICE inline SplitKvPoint filled_point(const SplitKvGeometry& g, const SplitKvBatch& batch, int place) {
  const int request = request_at(g, batch, place);
  const int each = static_cast<int>(work_cost(g, batch.tiles[request]));
  const int inside = place - static_cast<int>(batch.prefix[request]), work = inside / each;
  return {request * g.works_per_request + work, (inside - work * each) / kFilledTile};
}

// A run of works: where it begins, where it ends, and where a share must reach to for its end, which is behind it by
// an overhead inside a work.
struct SplitKvRun {
  int begin, end, reach;
};

ATTNOPS_HOST_DEVICE inline SplitKvRun filled_half(const SplitKvGeometry& g, const SplitKvBatch& batch, int total,
                                                  bool cuts, int half) {
  int request = 0;
  const int middle = filled_end(g, batch, {total / 2, cuts}, 0, request);
  if (half == 1) return {middle, total, total};
  const bool inside = filled_point(g, batch, middle).tile > 0;
  return {0, middle, middle + (inside ? static_cast<int>(overhead_cost(g)) : 0)};
}

// Fills shares of a run, `most` at most, and calls begins(share, place) for each. Returns how many; more than `most`
// where they are not enough.
template <class Begins>
ATTNOPS_HOST_DEVICE int fill_shares(const SplitKvGeometry& g, const SplitKvBatch& batch, SplitKvFilling filling,
                                    const SplitKvRun& run, int most, const Begins& begins) {
  if (run.begin == run.end) return 0;
  int from = run.begin, request = request_at(g, batch, from), count = 0;
  while (count < most) {
    begins(count++, from);
    if (from + filling.budget >= run.reach) return count;
    const int end = filled_end(g, batch, filling, from, request);
    if (end == from) break;
    from = end;
  }
  return most + 1;
}

// What is taken of the first budgets that are enough, of cuts and of whole works; kFilledBudgets: of none.
ATTNOPS_HOST_DEVICE inline bool filled_with_cuts(int cuts, int whole) {
  if (whole == kFilledBudgets || cuts == kFilledBudgets) return whole == kFilledBudgets;
  return cuts * kFilledTile + kMergeCost < whole * kFilledTile;
}

// The parts that have pieces of a work, of all `shares` and their end in order.
ATTNOPS_HOST_DEVICE inline SplitKvSpan filled_span(const SplitKvPoint* points, int shares, int work) {
  const auto first_from = [&](int least) {  // the first that begins in such a work or behind
    int low = 0, high = shares;
    while (low < high) {
      const int middle = (low + high) / 2;
      if (points[middle].work < least) {
        low = middle + 1;
      } else {
        high = middle;
      }
    }
    return low;
  };
  int first = first_from(work);
  const int last = first_from(work + 1) - 1;
  if (first > last || points[first].tile > 0) --first;
  return {first, last - first + 1};
}

ATTNOPS_HOST_DEVICE inline SplitKvEntry filled_entry(const SplitKvPoint* points, int shares, int part) {
  const SplitKvPoint begin = points[part], end = points[part + 1];
  SplitKvEntry entry{begin.work, begin.tile, end.work, end.tile, 0, 0, 0, part};
  if (begin.work == end.work && begin.tile == end.tile) return entry;
  const int last_work = end.tile > 0 ? end.work : end.work - 1;
  const SplitKvSpan span = filled_span(points, shares, begin.work);
  entry.begin_split = part - span.first_part;
  entry.begin_num_splits = span.num_splits;
  entry.last_num_splits = last_work == begin.work ? span.num_splits : filled_span(points, shares, last_work).num_splits;
  entry.first_part = span.first_part;
  return entry;
}

}  // namespace attnops
