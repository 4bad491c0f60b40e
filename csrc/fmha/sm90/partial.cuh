#pragma once
#include "fmha/sm90/work.cuh"

namespace attnops::fmha::sm90 {

// The scratch of a call with cut tiles: a slab of rows for each work of each piece, float [slabs, kRows, head_dim_v],
// then their lse, [slabs, kRows].
template <int kRows>
__device__ __forceinline__ float* partial_lse(const Params& p, const Schedule& s) {
  return p.partial + static_cast<int64_t>(s.max_pieces) * s.works_per_tile * kRows * p.head_dim_v;
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
