#pragma once
#include "compressed_kv/params.h"

struct CUstream_st;

namespace attnops::compressed_kv {

void launch(const PlanParams& p, CUstream_st* stream);
void launch(const Params& p, CUstream_st* stream);

}  // namespace attnops::compressed_kv
