#pragma once
#include "fmha/params.h"

struct CUstream_st;

namespace attnops::fmha {

inline constexpr int kAnyHeadDim = 576;  // the largest of either

void launch_any_bf16(const Params& p, CUstream_st* stream);
void launch_any_fp16(const Params& p, CUstream_st* stream);
void launch_any_fp32(const Params& p, CUstream_st* stream);

}  // namespace attnops::fmha
