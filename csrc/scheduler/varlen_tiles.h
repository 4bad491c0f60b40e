#pragma once
#include <cstdint>

#include "core/math.h"

namespace attnops {

// Order in which the query tiles of a ragged prefill are started. Requests come by falling cost of their last tile, and
// a request's tiles stay together, the last (under a causal mask the longest) first. So the last tiles to start are
// short and no CTA finishes alone (LPT rule: Graham 1969, at most 4/3 of the optimum), and tiles that run at the same
// time read the same keys: with tiles of all requests mixed by cost, a GPU's cache held too few of them (16 x 1024
// tokens with 8 KV heads: 67 MB at a time).
//
// Requests of half a tile's rows or fewer are narrow: memory binds them, and products bind the others. They come first,
// and kernels that know how let both take turns (row_in_turn), so that neither memory nor products wait for the other.
//
// A row of the plan is (request, tile of the request). Costs are binned to about 9 % (3 mantissa bits), and requests of
// one bin keep their order: a stable counting sort, which a GPU block does in parallel with the same result.

struct VarlenGeometry {
  int num_requests;
  int tile_q;       // query tokens per tile
  int window_left;  // -1: no window
  bool causal;
};

inline constexpr int kCostBins = 32 * 8, kNarrowBins = 64;  // the last of them

// KV tokens that tile `tile` of a request visits, at least 1.
ATTNOPS_HOST_DEVICE inline int64_t varlen_tile_cost(const VarlenGeometry& g, int seqlen_q, int seqlen_k, int tile) {
  const int first_query = tile * g.tile_q;
  const int last_query = min_of(first_query + g.tile_q, seqlen_q) - 1;
  const int offset = seqlen_k - seqlen_q;  // bottom-right alignment
  const int end = g.causal ? min_of(offset + last_query + 1, seqlen_k) : seqlen_k;
  const int64_t begin = g.window_left < 0 ? 0 : max_of(int64_t{offset} + first_query - g.window_left, int64_t{0});
  return max_of(end - begin, int64_t{1});
}

// Bin of a cost of at least 1, larger for longer: exponent and three mantissa bits.
ATTNOPS_HOST_DEVICE inline int cost_bin(int64_t cost) {
#if defined(__CUDA_ARCH__)
  const int exponent = 63 - __clzll(cost);
#else
  int exponent = 0;
  for (int64_t rest = cost; rest > 1; rest >>= 1) ++exponent;
#endif
  const int64_t mantissa = exponent >= 3 ? (cost >> (exponent - 3)) & 7 : (cost << (3 - exponent)) & 7;
  return min_of(exponent * 8 + static_cast<int>(mantissa), kCostBins - 1);
}

ATTNOPS_HOST_DEVICE inline bool is_narrow(const VarlenGeometry& g, int seqlen_q) { return seqlen_q <= g.tile_q / 2; }

// Bin of a request, larger for an earlier one: all narrow ones are above the others, in bins of 19 % from 256 keys on.
ATTNOPS_HOST_DEVICE inline int request_bin(int64_t cost, bool narrow) {
  constexpr int kWide = kCostBins - kNarrowBins;
  const int bin = cost_bin(cost);
  return narrow ? kWide + min_of(max_of(bin / 2 - 32, 0), kNarrowBins - 1) : min_of(bin, kWide - 1);
}

// Where the first `narrow` rows and the others take turns: the row that comes in place of `row`. `share` is 2^32 times
// the narrow rows' part of all, rounded up by turns_share; every row comes once.
ATTNOPS_HOST_DEVICE inline int row_in_turn(int row, int narrow, uint32_t share) {
  const auto before = [share](int n) { return static_cast<int>(uint64_t{static_cast<uint32_t>(n)} * share >> 32); };
  const int taken = min_of(before(row), narrow);
  return taken < narrow && before(row + 1) > taken ? taken
                                                   : static_cast<int>(static_cast<uint32_t>(narrow) + row - taken);
}
ATTNOPS_HOST_DEVICE inline uint32_t turns_share(int narrow, int rows) {
  return static_cast<uint32_t>(narrow * 4294967296.0 / rows) + 1;
}

}  // namespace attnops
