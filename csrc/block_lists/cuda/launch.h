#pragma once
#include "block_lists/label_scores.h"
#include "block_lists/params.h"

struct CUstream_st;

namespace attnops::block_lists {

// One launch; the grid depends on shapes alone.
void launch(const Params& params, CUstream_st* stream);
void launch(const ScoreParams& params, CUstream_st* stream);  // at most 65535 requests and KV heads

}  // namespace attnops::block_lists
