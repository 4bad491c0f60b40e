#pragma once
#include "context_parallel/params.h"

struct CUstream_st;

namespace attnops::context_parallel {

// One launch each; grids depend on shapes alone.
void launch(const SeqlensParams& params, CUstream_st* stream);
void launch(const SlotsParams& params, CUstream_st* stream);

}  // namespace attnops::context_parallel
