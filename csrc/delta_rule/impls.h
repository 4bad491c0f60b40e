#pragma once
#include "core/linear_prefill.h"

struct CUstream_st;

namespace attnops::delta_rule {

using LaunchPrefill = void (*)(const LinearPrefill&, CUstream_st*);

// The first kernel of the table that accepts the arguments; when none does, throws with the reason of each.
LaunchPrefill select_prefill(const LinearPrefill& params);

using LaunchDecode = void (*)(const LinearStep&, CUstream_st*);
LaunchDecode select_decode(const LinearStep& params);

}  // namespace attnops::delta_rule
