#pragma once
#include "xqa_decode/cpu/tile.h"
#include "xqa_decode/params.h"

namespace attnops::xqa_decode::cpu {

// One share of the plan: row `part` of tile_scheduler_metadata. Works that it does not share with other parts are
// written to `out`, pieces of the others to `out_partial`. Parts are independent of one another.
void run_part(const Params& params, const TileKernel& kernel, int part);

// Second step, when every part is done: merge the pieces of the works that are split.
// Balanced mode: `index` is a part, which merges the work that it starts and does not finish.
// Batch-invariant mode: `index` is a work.
void merge_balanced(const Params& params, const TileKernel& kernel, int index);
void merge_fixed(const Params& params, const TileKernel& kernel, int index);

}  // namespace attnops::xqa_decode::cpu
