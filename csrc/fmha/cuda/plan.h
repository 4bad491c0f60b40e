#pragma once
#include <cstdint>

#include "scheduler/varlen_tiles.h"

struct CUstream_st;

namespace attnops::fmha {

// What the planning kernel works on, all of it on the device.
struct TilePlan {
  VarlenGeometry geometry;
  const int32_t* cu_seqlens_q;   // [B + 1]
  const int32_t* cu_seqlens_k;   // [B + 1], or null
  const int32_t* cache_seqlens;  // [B], or null; neither: as many keys as queries
  int32_t* tile_order;           // [max_tiles, 2]: request, query tile of it; (-1, -1) past the last
  int max_tiles;
  int32_t* pieces = nullptr;  // [1 + max_pieces, 4] (scheduler/varlen_cuts.h), or null: no tile is cut
  int max_pieces = 0, works_per_tile = 1, num_sms = 0;  // 0: those of the device
  bool cut_in_part = true;
};

void launch_plan(const TilePlan& plan, CUstream_st* stream);

}  // namespace attnops::fmha
