#pragma once
#include "fmha/params.h"

struct CUstream_st;

namespace attnops::fmha {

using Launch = void (*)(const Params&, CUstream_st*);

// The first kernel of the table that accepts the arguments; when none does, throws with the reason of each.
Launch select_launch(const char* op, const Params& params);

}  // namespace attnops::fmha
