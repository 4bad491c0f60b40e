#pragma once
#include "core/linear_step.h"

struct CUstream_st;

namespace attnops::ssd {

void launch(const LinearStep& params, CUstream_st* stream);

}  // namespace attnops::ssd
