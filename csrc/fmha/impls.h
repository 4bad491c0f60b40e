#pragma once
#include "fmha/params.h"

struct CUstream_st;

namespace attnops::fmha {

// Launches the first kernel of the table that accepts the arguments; when none does, throws with the reason of each.
void launch(const char* op, const Params& params, CUstream_st* stream);

}  // namespace attnops::fmha
