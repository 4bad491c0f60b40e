#pragma once
#include "mla_decode/params.h"

struct CUstream_st;

namespace attnops::mla_decode {

using Launch = void (*)(const Params&, CUstream_st*);

// The first kernel of the table that accepts the arguments; when none does, throws with the reason of each. Addresses
// count for their alignment alone.
Launch select_launch(const Params& params);

}  // namespace attnops::mla_decode
