#pragma once
#include "causal_conv1d/params.h"

struct CUstream_st;

namespace attnops::causal_conv1d {

void launch(const Params& params, CUstream_st* stream);
void launch_drafts(const DraftParams& params, CUstream_st* stream);

}  // namespace attnops::causal_conv1d
