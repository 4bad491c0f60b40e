#pragma once
#include "core/linear_step.h"

struct CUstream_st;

namespace attnops::delta_rule {

void launch(const LinearStep& params, CUstream_st* stream);

}  // namespace attnops::delta_rule
