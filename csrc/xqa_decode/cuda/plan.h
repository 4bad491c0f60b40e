#pragma once
#include <cstdint>

#include "xqa_decode/plan.h"

struct CUstream_st;

namespace attnops::xqa_decode {

// The plan of plan_geometry on the device: tile_scheduler_metadata [num_sm_parts, 8], num_splits [B + 1].
void launch_plan(const SplitKvGeometry& geometry, const int32_t* cache_seqlens, int32_t* tile_scheduler_metadata,
                 int32_t* num_splits, CUstream_st* stream);

}  // namespace attnops::xqa_decode
