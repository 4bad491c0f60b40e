#pragma once
#include <cstdint>
#include <vector>

#include "core/divisor.h"
#include "core/math.h"
#include "scheduler/varlen_tiles.h"

namespace attnops {

// Where a ragged prefill has fewer tiles than a GPU has SMs, or one much longer than the others, long tiles are cut:
// their keys are divided evenly over pieces, whose results are merged. Tiles of more than `limit` units are cut into as
// few pieces as keep to the limit: all of them, or those that lie before the last tiles of the plan that fill all SMs
// once or oftener. The choice is the one with the least estimate of the time that all SMs need.
//
// Pieces are int32 [1 + max_pieces, 4]. Row 0: number of pieces, limit, rows of the plan whose tiles may be cut. Row
// 1 + i, piece i: request, tile, its number among the tile's pieces, how many these are. The pieces of a tile follow
// each other.
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
  int longest_behind;   // of those behind rows_before_full_turns
  int piece_cost;
};

// Whether tiles are half full or more. Few rows wait for memory, which others get while some SMs are idle; and their
// pieces are soon stored and merged.
ATTNOPS_HOST_DEVICE inline bool has_full_tiles(int num_tiles, int64_t tokens, int tile_q) {
  return 2 * tokens >= int64_t{num_tiles} * tile_q;
}

// Rows of the plan that are not among the last ones which fill all SMs as often as they can; all rows, where these are
// none or tiles are not full.
ATTNOPS_HOST_DEVICE inline int rows_before_full_turns(const CutProblem& p) {
  const int turns = p.by_sms.divide(p.num_tiles * p.works_per_tile);  // below 2^29
  const int rows = p.num_tiles - p.by_works.divide(turns * p.num_sms);
  return rows == 0 || p.piece_cost == kCostOfPiece ? p.num_tiles : rows;
}

// Candidate 0 cuts nothing, the others cut the longest tile into 2 to 160 pieces, the last three so that all tiles,
// were they alike, would fill all SMs once, twice and three times.
// `divide`: the quotient of two ints, rounded down.
template <class Divide>
ATTNOPS_HOST_DEVICE int cut_limit(const CutProblem& p, int candidate, const Divide& divide) {
  int pieces = candidate + 1;
  if (candidate >= 16) pieces = (20 + 4 * (candidate % 4)) << (candidate - 16) / 4;
  if (candidate >= 29) pieces = divide((candidate - 28) * p.num_sms, max_of(p.num_tiles * p.works_per_tile, 1));
  pieces = max_of(pieces, 1);
  return max_of(divide(p.longest + pieces - 1, pieces), kLeastUnitsOfPiece);
}

ATTNOPS_HOST_DEVICE inline int pieces_of(int units, int limit) {
  return units > limit ? static_cast<int>((static_cast<unsigned>(units) + limit - 1) / static_cast<unsigned>(limit))
                       : 1;
}

// What is cut: tiles of more units than `limit` in the first `rows` rows of the plan.
struct Cut {
  int limit, rows;
};

// What a limit makes of the tiles.
struct CutTally {
  int tiles = 0, pieces = 0;  // that are cut, and what they become
  int longest, shortest;      // units of a work

  // A tile that is divided into `count`.
  ATTNOPS_HOST_DEVICE void add(int count) {
    if (count <= 1) return;
    ++tiles;
    pieces += count;
  }
};

// Estimated time in units, times the SMs: a GPU divides slowly. -1: not possible. A work costs a unit besides its keys,
// a piece of a cut tile so many more, the merge two. The last works to start are the shortest.
ATTNOPS_HOST_DEVICE inline int64_t cut_estimate(const CutProblem& p, const CutTally& t) {
  if (t.pieces > p.max_pieces) return -1;
  const int rows = p.num_tiles - t.tiles + t.pieces, works = rows * p.works_per_tile;  // below 2^29
  const int64_t busy = (p.total_units + rows + int64_t{p.piece_cost} * t.pieces) * p.works_per_tile;
  const int64_t idle = int64_t{p.by_sms.divide(works + p.num_sms - 1) * p.num_sms - works} * t.shortest;
  const int64_t longest = (t.longest + int64_t{1}) * p.num_sms;
  return max_of(busy + idle, longest) + (t.pieces > 0 ? 2 * p.num_sms : 0);
}

// Estimate of whole tiles: that of candidate 0, too.
ATTNOPS_HOST_DEVICE inline int64_t whole_estimate(const CutProblem& p, int shortest) {
  return cut_estimate(p, {0, 0, p.longest, shortest});
}

// Whether whole tiles take so much longer than all SMs could, that cuts are looked for.
ATTNOPS_HOST_DEVICE inline bool worth_cutting(const CutProblem& p, int64_t whole) {
  const int64_t least = (p.total_units + p.num_tiles) * p.works_per_tile;
  return whole > least + least / 16 + 2 * p.num_sms;
}

// What to cut of tiles of so many units each, on the host. A GPU finds the same in fmha/cuda/plan_cuts.cuh.
// `tokens`: of all tiles.
inline Cut find_cut(const std::vector<int>& units, int works_per_tile, int num_sms, int max_pieces, int64_t tokens,
                    int tile_q) {
  Cut chosen{kNeverCut, 0};
  if (units.empty() || units.size() > kMostTilesToCut) return chosen;
  const int num_tiles = static_cast<int>(units.size());
  CutProblem problem{.works_per_tile = works_per_tile,
                     .num_sms = num_sms,
                     .max_pieces = max_pieces,
                     .num_tiles = num_tiles,
                     .longest = 0,
                     .by_sms = Divisor(num_sms),
                     .by_works = Divisor(works_per_tile),
                     .total_units = 0,
                     .longest_behind = 0,
                     .piece_cost = has_full_tiles(num_tiles, tokens, tile_q) ? kCostOfFullPiece : kCostOfPiece};
  const int before = rows_before_full_turns(problem);
  int shortest = kNeverCut;
  for (int row = 0; row < num_tiles; ++row) {
    problem.longest = max_of(problem.longest, units[row]);
    if (row >= before) problem.longest_behind = max_of(problem.longest_behind, units[row]);
    problem.total_units += units[row];
    shortest = min_of(shortest, units[row]);
  }
  if (!worth_cutting(problem, whole_estimate(problem, shortest))) return chosen;
  uint64_t least = UINT64_MAX;
  for (int candidate = 0; candidate < kCutCandidates; ++candidate) {
    const int limit = cut_limit(problem, candidate, [](int a, int b) { return a / b; });
    for (const bool some : {false, true}) {
      const int rows = some ? before : num_tiles;
      if (some && rows == num_tiles) continue;
      CutTally tally{0, 0, min_of(limit, problem.longest), min_of(limit, shortest)};
      if (some) tally.longest = max_of(tally.longest, problem.longest_behind);
      for (int row = 0; row < rows; ++row) tally.add(pieces_of(units[row], limit));
      const auto estimate = static_cast<uint64_t>(cut_estimate(problem, tally));
      if (estimate >= least) continue;  // one that is not possible is the largest
      least = estimate;
      chosen = tally.pieces > 0 ? Cut{limit, rows} : Cut{kNeverCut, 0};
    }
  }
  return chosen;
}

}  // namespace attnops
