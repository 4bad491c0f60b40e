#pragma once
#include <cstdint>
#include <vector>

#include "core/divisor.h"
#include "core/math.h"
#include "scheduler/varlen_tiles.h"

namespace attnops {

// Where a ragged prefill has fewer tiles than a GPU has SMs, or one much longer than the others, long tiles are cut:
// their keys are divided evenly over pieces, whose results are merged. Tiles of more than `limit` units are cut into as
// few pieces as keep to the limit: all of them, or those behind the plan's first tiles that fill all SMs once or
// oftener. The choice is the one with the least estimate of the time that all SMs need.
//
// Pieces are int32 [1 + max_pieces, 4]. Row 0: number of pieces, limit, the first row of the plan whose tile may be
// cut. Row 1 + i, piece i: request, tile, its number among the tile's pieces, how many these are. The pieces of a tile
// follow each other.
inline constexpr int kUnitKeys = 128;        // keys of a unit of cost: about a step of a kernel's main loop
inline constexpr int kMostTilesToCut = 512;  // batches with more tiles are left whole
inline constexpr int kCutCandidates = 32;    // a lane each
inline constexpr int kNeverCut = INT32_MAX;
inline constexpr int kLeastUnitsOfPiece = 2;
inline constexpr int kCostOfPiece = 1, kCostOfFullPiece = 4;  // units, by measurement: docs/log/fmha_sm90.md

ATTNOPS_HOST_DEVICE inline int cost_units(int64_t cost) {
  return static_cast<int>(min_of<int64_t>((cost + kUnitKeys - 1) / kUnitKeys, 1 << 21));
}

struct CutProblem {
  int works_per_tile;  // that share its keys: KV heads, blocks of query heads
  int num_sms, max_pieces;
  int num_tiles, longest;  // units of the longest tile
  Divisor by_sms, by_works;
  int64_t total_units;  // of all tiles
  bool full;            // has_full_tiles
};

// Whether tiles are half full or more. Few rows wait for memory, which others get while some SMs are idle; and their
// pieces are soon stored and merged. Of kMostTilesToCut tiles at most.
ATTNOPS_HOST_DEVICE inline bool has_full_tiles(int num_tiles, int tokens, int tile_q) {
  return tokens >= (num_tiles * tile_q + 1) / 2;
}

// The plan's first rows that fill all SMs as often as they can. 0 where these are all rows, or tiles are not full.
ATTNOPS_HOST_DEVICE inline int rows_of_full_turns(const CutProblem& p) {
  const int turns = p.by_sms.divide(p.num_tiles * p.works_per_tile);  // below 2^29
  const int rows = p.by_works.divide(turns * p.num_sms);
  return p.full && rows < p.num_tiles ? rows : 0;
}

// From which row on a candidate cuts. Where full turns have rows, every other candidate leaves these whole.
ATTNOPS_HOST_DEVICE inline int first_row_of(int candidate, int full_rows) { return candidate % 2 == 0 ? 0 : full_rows; }

// Candidate 0 cuts nothing, the others cut the longest tile into 2 to 160 pieces, the last ones so that all tiles that
// may be cut, were they alike, would fill all SMs once or oftener. Where full turns have rows, two candidates share
// a limit.
// `divide`: the quotient of two ints, rounded down.
template <class Divide>
ATTNOPS_HOST_DEVICE int cut_limit(const CutProblem& p, int full_rows, int candidate, const Divide& divide) {
  int number = candidate, turns = candidate - 28;
  if (full_rows > 0) {
    number = candidate / 2;
    turns = number - 13;
    if (number >= 6) number = 2 * number - 5;  // 8, 10 and so on to 16 pieces, 24 and more
  }
  int pieces = number + 1;
  if (number >= 16) pieces = (20 + 4 * (number % 4)) << (number - 16) / 4;
  if (turns > 0) {
    const int rows = p.num_tiles - first_row_of(candidate, full_rows);
    pieces = divide(turns * p.num_sms, max_of(rows * p.works_per_tile, 1));
  }
  pieces = max_of(pieces, 1);
  return max_of(divide(p.longest + pieces - 1, pieces), kLeastUnitsOfPiece);
}

ATTNOPS_HOST_DEVICE inline int pieces_of(int units, int limit) {
  return units > limit ? static_cast<int>((static_cast<unsigned>(units) + limit - 1) / static_cast<unsigned>(limit))
                       : 1;
}

// What is cut: tiles of more units than `limit` from row `first` of the plan on.
struct Cut {
  int limit = kNeverCut, first = 0;
};

// What a cut makes of the tiles.
struct CutTally {
  int pieces = 0;         // whole tiles among them
  int cut = 0;            // of tiles that are cut
  int longest, shortest;  // units of a piece
  int before = 0;         // units of the longest tile before the rows that may be cut

  // A tile that is divided into `count`.
  ATTNOPS_HOST_DEVICE void add(int count) {
    pieces += count;
    if (count > 1) cut += count;
  }
};

// Estimated time in units, times the SMs: a GPU divides slowly. The largest: not possible. A work costs a unit besides
// its keys, a piece of a cut tile some more, the merge two. The last works to start are the shortest. Where tiles have
// few rows, what the longest and the last piece cost more is left out. Where tiles differ, the estimate errs by some
// percent: so it must be a sixteenth better that the first rows stay whole.
ATTNOPS_HOST_DEVICE inline uint64_t cut_estimate(const CutProblem& p, const CutTally& t, int first) {
  if (t.cut > p.max_pieces) return UINT64_MAX;
  const int works = t.pieces * p.works_per_tile;  // below 2^29
  const int of_piece = p.full ? kCostOfFullPiece : kCostOfPiece, more = p.full && t.cut > 0 ? of_piece : 0;
  const int64_t busy = (p.total_units + t.pieces + t.cut * of_piece) * p.works_per_tile;
  const int64_t idle = int64_t{p.by_sms.divide(works + p.num_sms - 1) * p.num_sms - works} * (t.shortest + more);
  const int64_t longest = (max_of(t.longest + more, t.before) + int64_t{1}) * p.num_sms;
  const auto all = static_cast<uint64_t>(max_of(busy + idle, longest) + (t.cut > 0 ? 2 * p.num_sms : 0));
  return first > 0 ? all + all / 16 : all;
}

// Estimate of whole tiles: that of candidate 0, too.
ATTNOPS_HOST_DEVICE inline uint64_t whole_estimate(const CutProblem& p, int shortest) {
  return cut_estimate(p, {.pieces = p.num_tiles, .cut = 0, .longest = p.longest, .shortest = shortest}, 0);
}

// Whether whole tiles take so much longer than all SMs could, that cuts are looked for.
ATTNOPS_HOST_DEVICE inline bool worth_cutting(const CutProblem& p, uint64_t whole) {
  const auto least = static_cast<uint64_t>((p.total_units + p.num_tiles) * p.works_per_tile);
  return whole > least + least / 16 + 2 * p.num_sms;
}

// What to cut of tiles of so many units each, on the host. A GPU finds the same in fmha/cuda/plan_cuts.cuh. `tokens`:
// of all tiles.
inline Cut find_cut(const std::vector<int>& units, int works_per_tile, int num_sms, int max_pieces, int tokens,
                    int tile_q, bool cut_in_part) {
  if (units.empty() || units.size() > kMostTilesToCut) return {};
  const int num_tiles = static_cast<int>(units.size());
  CutProblem problem{.works_per_tile = works_per_tile,
                     .num_sms = num_sms,
                     .max_pieces = max_pieces,
                     .num_tiles = num_tiles,
                     .longest = 0,
                     .by_sms = Divisor(num_sms),
                     .by_works = Divisor(works_per_tile),
                     .total_units = 0,
                     .full = cut_in_part && has_full_tiles(num_tiles, tokens, tile_q)};
  int shortest = kNeverCut;
  for (const int n : units) {
    problem.longest = max_of(problem.longest, n);
    problem.total_units += n;
    shortest = min_of(shortest, n);
  }
  if (!worth_cutting(problem, whole_estimate(problem, shortest))) return {};
  const int full_rows = rows_of_full_turns(problem);
  int longest_before = 0;
  for (int row = 0; row < full_rows; ++row) longest_before = max_of(longest_before, units[row]);
  Cut chosen;
  uint64_t least = UINT64_MAX;
  for (int candidate = 0; candidate < kCutCandidates; ++candidate) {
    const int limit = cut_limit(problem, full_rows, candidate, [](int a, int b) { return a / b; });
    const int first = first_row_of(candidate, full_rows);
    CutTally tally{.longest = min_of(limit, problem.longest),
                   .shortest = min_of(limit, shortest),
                   .before = first > 0 ? longest_before : 0};
    for (int row = 0; row < num_tiles; ++row) tally.add(row < first ? 1 : pieces_of(units[row], limit));
    const uint64_t estimate = cut_estimate(problem, tally, first);
    if (estimate >= least) continue;  // what is not possible is the largest
    least = estimate;
    chosen = tally.cut > 0 ? Cut{limit, first} : Cut{};
  }
  return chosen;
}

}  // namespace attnops
