#pragma once
#include "xqa_decode/sm90/cluster_wgmma/limits.h"
#include "xqa_decode/sm90/cluster_wgmma/team.h"
#include "xqa_decode/sm90/kernel.cuh"

namespace attnops::xqa_decode::sm90 {

// A kernel without the parts of the plan, for calls of which the host knows that none is long.
template <class Tr>
struct ShortTraits : Tr {
  static constexpr bool kNeverLong = true;
};

// Kernels of calls that may be long: those of pairs of CTAs. With three CTAs per SM they are of larger clusters.
template <class Tr>
constexpr bool may_be_long_call() {
  if constexpr (requires { Tr::kNeverLong; }) return false;
  return !Tr::kFolds && Tr::kCtasPerSm < 3;
}
template <class Tr>
inline constexpr bool kMayBeLong = may_be_long_call<Tr>();

// Whether some request is so long that a team of it would keep all others waiting: the call is then done by the parts
// of the plan. Every warp finds that out by itself, from all lengths, and all find the same. All loads go out together,
// beside those of the caller: one wait. kGuess: before the kernels ahead have ended.
template <class Tr, bool kGuess = false>
__device__ __forceinline__ bool is_long(const Params& p, const Team& team, int lane) {
  if (!kMayBeLong<Tr> || team.most_tiles == 0) return false;
  constexpr int kMostPerLane = kMaxTeams / 32 + 1;
  int lengths[kMostPerLane];
#pragma unroll
  for (int i = 0; i < kMostPerLane; ++i) {
    const int request = lane + 32 * i;
    lengths[i] = 0;
    if (request >= p.batch_size) continue;
    lengths[i] = kGuess ? hopper::load_guess(p.cache_seqlens + request) : __ldcg(p.cache_seqlens + request);
  }
  int longest = 0;
#pragma unroll
  for (int i = 0; i < kMostPerLane; ++i) longest = max_of(longest, lengths[i]);
  longest = __reduce_max_sync(~0u, longest);
  return visible_tiles(longest, p.seqlen_q, p.window_left, kPlanTileTokens).count > team.most_tiles;
}

// The kernel as one of the plan: as few units on their way, at places of their own in shared memory.
template <class Tr>
struct FewUnitsTraits : Tr {
  static constexpr int kUnits =
      Tr::kGathers ? Tr::kUnits : min_of(Tr::kUnits, Tr::kFp8 ? 4 : 64 * 1024 / Tr::kUnitBytes);
};

// Teams that have blocks of rows, and what does parts of the plan for them: with all rows at once.
template <class Tr, class Part_>
struct BlockTraits : Tr {
  using Part = Part_;
  static_assert(Part::kAllThreads == Tr::kAllThreads && Part::kCtasPerSm == Tr::kCtasPerSm);
  static_assert(Part::kColumns == Tr::kColumns);
};

template <class Tr>
struct PartOf {
  using Traits = FewUnitsTraits<Tr>;
};
template <class Tr>
  requires requires { typename Tr::Part; }
struct PartOf<Tr> {
  using Traits = typename Tr::Part;
};
template <class Tr>
using PartTraits = typename PartOf<Tr>::Traits;

// Calls `walk` with the pieces of the CTA's part, if it has any. For all threads of the CTA.
template <class Tr, class Walk>
__device__ __forceinline__ void with_part(const Params& p, const Shape& shape, uint32_t shared, const Walk& walk) {
  const int part = blockIdx.x;
  if (part >= p.num_sm_parts) return;
  constexpr bool kOwnBarriers = SharedLayout<PartTraits<Tr>>::kFull != SharedLayout<Tr>::kFull;
  if (kOwnBarriers && threadIdx.x == 0) init_barriers<PartTraits<Tr>>(shared);
  const PartEntry entry(p, shape, part);
  __syncthreads();
  if (!entry.has_work) return;
  PieceWalk piece(p, shape, entry, part);
  if (piece.next()) walk(piece);
}

// What the warps that bring tiles do with the part, and those that multiply.
template <class Tr>
__device__ __forceinline__ void bring_part(const Params& p, const Shape& shape, const Boxes& boxes,
                                           const CUtensorMap* keys, const CUtensorMap* values, uint32_t shared,
                                           int warp, int lane) {
  if constexpr (kMayBeLong<Tr>) {
    with_part<Tr>(p, shape, shared, [&](PieceWalk& piece) {
      bring_pieces<PartTraits<Tr>>(p, shape, boxes, *keys, *values, piece, shared, warp, lane);
    });
  }
}

template <class Tr>
__device__ __forceinline__ void multiply_part(const Params& p, const Shape& shape, const Boxes& boxes, uint8_t* smem) {
  if constexpr (kMayBeLong<Tr>) {
    with_part<Tr>(p, shape, hopper::smem_address(smem),
                  [&](PieceWalk& piece) { Consumer<PartTraits<Tr>>(p, shape, boxes, smem).run(piece); });
  }
}

}  // namespace attnops::xqa_decode::sm90
