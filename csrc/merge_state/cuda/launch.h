#pragma once
#include "merge_state/params.h"

struct CUstream_st;

namespace attnops::merge_state {

void launch(const Params& params, CUstream_st* stream);
void launch(const ManyParams& params, CUstream_st* stream);

}  // namespace attnops::merge_state
