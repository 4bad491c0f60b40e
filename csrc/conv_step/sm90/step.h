#pragma once
#include "causal_conv1d/params.h"
#include "core/linear_step.h"

struct CUstream_st;

namespace attnops::conv_step::sm90 {

// The convolution and the recurrence in one launch, where a kernel takes the call; false: none does. `step` needs no q,
// k and v.
bool launch(const causal_conv1d::Params& conv, const LinearStep& step, CUstream_st* stream);

}  // namespace attnops::conv_step::sm90
