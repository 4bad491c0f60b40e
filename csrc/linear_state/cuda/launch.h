#pragma once
#include "linear_state/params.h"

struct CUstream_st;

namespace attnops::linear_state {

void launch(const Params& params, CUstream_st* stream);

}  // namespace attnops::linear_state
