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
// A row of the plan is (request, tile of the request). Costs are binned to about 9 % (3 mantissa bits), and requests of
// one bin keep their order: a stable counting sort, which a GPU block does in parallel with the same result.

struct VarlenGeometry {
  int num_requests;
  int tile_q;       // query tokens per tile
  int window_left;  // -1: no window
  bool causal;
};

inline constexpr int kCostBins = 32 * 8;

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

}  // namespace attnops
