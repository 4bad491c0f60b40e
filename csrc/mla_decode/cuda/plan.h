#pragma once
#include <cstdint>

#include "mla_decode/plan.h"
#include "mla_decode/selected.h"

struct CUstream_st;

namespace attnops::mla_decode {

// The plan of plan_geometry on the device: tile_scheduler_metadata [num_sm_parts, 8], num_splits [B + 1].
void launch_plan(const SplitKvGeometry& geometry, const int32_t* cache_seqlens, int32_t* tile_scheduler_metadata,
                 int32_t* num_splits, CUstream_st* stream);

// The same over the keys of lists: of `selected` and `extra`, lengths and counts alone.
void launch_list_plan(const SplitKvGeometry& geometry, const SelectedRows& selected, const SelectedRows& extra,
                      int32_t* tile_scheduler_metadata, int32_t* num_splits, CUstream_st* stream);

}  // namespace attnops::mla_decode
