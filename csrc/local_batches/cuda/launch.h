#pragma once
#include "local_batches/params.h"

struct CUstream_st;

namespace attnops::local_batches {

// One launch; the grid depends on shapes alone.
void launch(const Params& params, CUstream_st* stream);

}  // namespace attnops::local_batches
