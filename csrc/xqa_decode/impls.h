#pragma once
#include "xqa_decode/params.h"

namespace attnops::xqa_decode {

using Launch = LaunchFunction*;

// The first kernel of the table that accepts the arguments; when none does, throws with the reason of each. Addresses
// count for their alignment alone.
Launch select_launch(const Params& params);

}  // namespace attnops::xqa_decode
