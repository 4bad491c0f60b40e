#pragma once
#include "core/divisor.h"
#include "core/math.h"
#include "fmha/cuda/plan.h"
#include "scheduler/varlen_cuts.h"

namespace attnops::fmha {

struct Lengths {
  int queries, keys;
};

// What the host knows beside the plan. Lengths are asked for at once: no read waits for another.
struct HostKnows {
  const int32_t *first_query, *first_key, *end_key;
  bool has_lengths;  // end_key is them
  Divisor by_tile_q, by_sms, by_works;
  int num_sms;

  HostKnows(const TilePlan& p, int sms)
      : first_query(p.cu_seqlens_q),
        first_key(p.cu_seqlens_k != nullptr ? p.cu_seqlens_k : p.cu_seqlens_q),
        end_key(first_key + 1),
        has_lengths(p.cu_seqlens_k == nullptr && p.cache_seqlens != nullptr),
        by_tile_q(p.geometry.tile_q),
        by_sms(sms),
        by_works(p.works_per_tile),
        num_sms(sms) {
    if (has_lengths) end_key = p.cache_seqlens;
  }

  // Of all requests. Asked for together with lengths: nobody waits for it.
  __device__ int tokens_of(int num_requests) const {
    return static_cast<int>(static_cast<unsigned>(first_query[num_requests]) - static_cast<unsigned>(first_query[0]));
  }
  __device__ Lengths lengths_of(int request) const {
    const int first = first_query[request], end = first_query[request + 1];
    const int first_of_keys = first_key[request], end_of_keys = end_key[request];
    return {end - first, has_lengths ? end_of_keys : end_of_keys - first_of_keys};
  }
};

// No more than the plan has rows for: hostile lengths must not overflow.
__device__ inline int num_query_tiles(const TilePlan& p, const HostKnows& known, int queries) {
  return queries > 0 ? min_of(known.by_tile_q.divide(queries - 1), p.max_tiles) + 1 : 0;
}

// Of lengths of 31 bits, so it has no more.
__device__ inline unsigned cost_of(const TilePlan& p, const Lengths& lengths, int tile) {
  return static_cast<unsigned>(varlen_tile_cost(p.geometry, lengths.queries, lengths.keys, tile));
}

// cost_units of such a cost.
__device__ inline int units_of(unsigned cost) {
  return static_cast<int>(min_of((cost + kUnitKeys - 1) / kUnitKeys, 1u << 21));
}

// Bin of a request: of its last tile.
__device__ inline int bin_of(const TilePlan& p, const Lengths& lengths, int num_tiles) {
  return cost_bin(cost_of(p, lengths, num_tiles - 1));
}

}  // namespace attnops::fmha
