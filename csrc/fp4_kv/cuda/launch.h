#pragma once
#include "fp4_kv/params.h"

struct CUstream_st;

namespace attnops::fp4_kv {

void launch(const StoreParams& params, CUstream_st* stream);
void launch(const DecodeParams& params, CUstream_st* stream);

}  // namespace attnops::fp4_kv
