#pragma once
#include "xqa_decode/params.h"

struct CUstream_st;

namespace attnops::xqa_decode::sm90::fp8 {

// Head dims up to 128; by boxes of the copy engine, and row by row for pages that are too small for boxes.
void launch_hd128(const Params& params, CUstream_st* stream);
void launch_gather_hd128(const Params& params, CUstream_st* stream);

// Ahead of them, where a part has several works: those that are short (lone_works.cuh). False where there are none.
bool launch_lone_works(const Params& params, CUstream_st* stream);

}  // namespace attnops::xqa_decode::sm90::fp8
