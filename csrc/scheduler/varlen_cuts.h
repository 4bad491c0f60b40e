#pragma once
#include <cstdint>
#include <vector>

#include "core/divisor.h"
#include "core/math.h"
#include "scheduler/varlen_tiles.h"

namespace attnops {

// Where a ragged prefill has fewer tiles than a GPU has SMs, or one much longer than the others, long tiles are cut:
// their keys are divided evenly over pieces, whose results are merged. All tiles of more than `limit` units are cut
// into as few pieces as keep to the limit. The limit is the candidate with the least estimate of the time that all SMs
// need.
//
// Pieces are int32 [1 + max_pieces, 4]. Row 0: number of pieces, limit. Row 1 + i, piece i: request, tile, its number
// among the tile's pieces, how many these are. The pieces of a tile follow each other.
inline constexpr int kUnitKeys = 128;        // keys of a unit of cost: about a step of a kernel's main loop
inline constexpr int kMostTilesToCut = 512;  // batches with more tiles are left whole
inline constexpr int kCutCandidates = 32;    // a lane each
inline constexpr int kNeverCut = INT32_MAX;
inline constexpr int kLeastUnitsOfPiece = 2;

ATTNOPS_HOST_DEVICE inline int cost_units(int64_t cost) {
  return static_cast<int>(min_of<int64_t>((cost + kUnitKeys - 1) / kUnitKeys, 1 << 21));
}

struct CutProblem {
  int works_per_tile;  // that share its keys: KV heads, blocks of query heads
  int num_sms, max_pieces;
  int num_tiles, longest;  // units of the longest tile
  Divisor by_sms;
  int64_t total_units;  // of all tiles
};

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

// What a limit makes of the tiles. A work is large if it has more than a third of the limit: all pieces have.
struct CutTally {
  int pieces = 0;            // whole tiles among them
  int cut = 0;               // of tiles that are cut
  int large = 0;             // works of a tile
  unsigned large_units = 0;  // and what each costs besides

  // A tile of so many units, cut into `count`; none if that is 0.
  ATTNOPS_HOST_DEVICE void add(int units, int limit, int count) {
    pieces += count;
    if (count > 1) {
      cut += count;
      large += count;
      large_units += static_cast<unsigned>(units) + 2u * static_cast<unsigned>(count);
    } else if (int64_t{3} * units > limit) {
      ++large;
      large_units += static_cast<unsigned>(units) + 1u;
    }
  }
};

// Time of all works without a pause, times the SMs. A work costs a unit besides its keys, and a piece another one.
ATTNOPS_HOST_DEVICE inline int64_t busy_units(const CutProblem& p, int pieces, int cut) {
  return (p.total_units + pieces + cut) * p.works_per_tile;
}

// Estimated time in units, times the SMs: a GPU divides slowly. -1: not possible.
//
// Large works, pieces first, are dealt out in turns. If the last turn is not full, SMs differ by half of such a work,
// or by as much as the idle ones would do. Small works come last and fill that, as far as they go. A merge costs two
// units. Where there is more than a turn, SMs end apart by an eighth of a large work.
ATTNOPS_HOST_DEVICE inline int64_t cut_estimate(const CutProblem& p, const CutTally& t, int limit) {
  if (t.cut > p.max_pieces) return -1;
  const int works = t.large * p.works_per_tile;  // below 2^29
  const int idle = p.by_sms.divide(works + p.num_sms - 1) * p.num_sms - works;
  const int64_t mean = t.large_units / static_cast<unsigned>(max_of(t.large, 1));
  const int64_t large = int64_t{t.large_units} * p.works_per_tile + min_of(p.num_sms / 2, idle) * mean;
  const int64_t longest = (min_of(limit, p.longest) + int64_t{1}) * p.num_sms;
  return max_of(max_of(busy_units(p, t.pieces, t.cut), large), longest) +
         (works > p.num_sms ? mean * p.num_sms / 8 : 0) + (t.cut > 0 ? 2 * p.num_sms : 0);
}

// A simpler estimate of whole tiles: the last works to start are the shortest.
ATTNOPS_HOST_DEVICE inline int64_t whole_estimate(const CutProblem& p, int shortest) {
  const int works = p.num_tiles * p.works_per_tile;
  const int64_t idle = int64_t{p.by_sms.divide(works + p.num_sms - 1) * p.num_sms - works} * shortest;
  return max_of(busy_units(p, p.num_tiles, 0) + idle, (p.longest + int64_t{1}) * p.num_sms);
}

// Whether whole tiles take so much longer than all SMs could, that cuts are looked for.
ATTNOPS_HOST_DEVICE inline bool worth_cutting(const CutProblem& p, int64_t whole) {
  const int64_t least = busy_units(p, p.num_tiles, 0);
  return whole > least + least / 16 + 2 * p.num_sms;
}

// The limit for tiles of so many units each, on the host. A GPU finds the same one in fmha/cuda/plan_cuts.cuh.
inline int find_cut_limit(const std::vector<int>& units, int works_per_tile, int num_sms, int max_pieces) {
  if (units.size() > kMostTilesToCut) return kNeverCut;
  CutProblem problem{works_per_tile, num_sms, max_pieces, static_cast<int>(units.size()), 0, Divisor(num_sms), 0};
  int shortest = kNeverCut;
  for (const int n : units) {
    problem.longest = max_of(problem.longest, n);
    problem.total_units += n;
    shortest = min_of(shortest, n);
  }
  if (units.empty() || !worth_cutting(problem, whole_estimate(problem, shortest))) return kNeverCut;
  int chosen = kNeverCut;
  int64_t least = INT64_MAX;
  for (int candidate = 0; candidate < kCutCandidates; ++candidate) {
    const int limit = cut_limit(problem, candidate, [](int a, int b) { return a / b; });
    CutTally tally;
    for (const int n : units) tally.add(n, limit, pieces_of(n, limit));
    const int64_t estimate = cut_estimate(problem, tally, limit);
    if (estimate < 0 || estimate >= least) continue;
    least = estimate;
    chosen = tally.cut > 0 ? limit : kNeverCut;
  }
  return chosen;
}

}  // namespace attnops
