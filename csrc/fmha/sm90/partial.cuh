#pragma once
#include "fmha/sm90/work.cuh"
#include "scheduler/varlen_cuts.h"

namespace attnops::fmha::sm90 {

// The scratch of a call with cut tiles: a slab of rows for each work of each piece, float [slabs, kRows, head_dim_v],
// then their lse, [slabs, kRows].
template <int kRows>
__device__ __forceinline__ float* partial_lse(const Params& p, const Schedule& s) {
  return p.partial + static_cast<int64_t>(s.max_pieces) * s.works_per_tile * kRows * p.head_dim_v;
}

// How many pieces of the plan a call can have: none where the scratch has no room for all of them, nor where keys are
// too few to be cut. Tiles are left whole then: the plan's order has them all.
template <class Tr>
int max_pieces_of(const Params& p, int works_per_tile) {
  const bool may_cut = p.paged || p.num_k_tokens > kLeastUnitsOfPiece * kUnitKeys;
  const int64_t floats = p.max_pieces * int64_t{works_per_tile} * Tr::kRows * (p.head_dim_v + 1);
  return may_cut && p.partial_size >= floats ? p.max_pieces : 0;
}

// A row of a piece, as it is before the merge.
template <class Tr>
__device__ __forceinline__ void store_piece(const Params& p, const Schedule& s, const Work& w, int row, float lse,
                                            float factor, int h, int lane, const float (&out)[Tr::kHeadDimV / 2]) {
  const int64_t at = static_cast<int64_t>(w.slab) * Tr::kRows + row;
  if (lane % 4 == 0) partial_lse<Tr::kRows>(p, s)[at] = lse;
  float* to = p.partial + at * p.head_dim_v + lane % 4 * 2;
#pragma unroll
  for (int j = 0; j < Tr::kHeadDimV / 8; ++j) {
    const float* o = out + 4 * j + 2 * h;
    if (8 * j < p.head_dim_v) {
      *reinterpret_cast<float2*>(to + 8 * j) = factor == 0.f ? float2{0.f, 0.f} : float2{o[0] * factor, o[1] * factor};
    }
  }
}

// Counts warps that have stored their rows of a piece.
__device__ __forceinline__ void count_piece(const Params& p, int warps) {
  __threadfence();
  atomicAdd(p.semaphores + 2, warps);
}

// The last CTA to find no more work leaves the counters as it found them.
__device__ __forceinline__ void leave(const Params& p) {
  if (p.semaphores == nullptr) return;
  __threadfence();
  if (atomicAdd(p.semaphores + 1, 1) != static_cast<int>(gridDim.x) - 1) return;
  p.semaphores[0] = 0;
  p.semaphores[1] = 0;
  p.semaphores[2] = 0;
}

}  // namespace attnops::fmha::sm90
