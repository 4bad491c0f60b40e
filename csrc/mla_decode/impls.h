#pragma once
#include "mla_decode/params.h"

struct CUstream_st;

namespace attnops::mla_decode {

// Runs the first kernel of the table that accepts the arguments; when none does, throws with the reason of each.
void launch(const Params& params, CUstream_st* stream);

}  // namespace attnops::mla_decode
