#pragma once
#include "xqa_decode/params.h"

struct CUstream_st;

namespace attnops::xqa_decode {

// Runs the first kernel of the table that accepts the arguments; when none does, throws with the reason of each.
void launch(const Params& params, CUstream_st* stream);

}  // namespace attnops::xqa_decode
