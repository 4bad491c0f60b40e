#pragma once
#include "fmha/params.h"

struct CUstream_st;

namespace attnops::fmha::sm90 {

void launch_bf16_hd64(const Params& p, CUstream_st* stream);
void launch_bf16_hd96(const Params& p, CUstream_st* stream);
void launch_bf16_hd128(const Params& p, CUstream_st* stream);
void launch_bf16_hd192x128(const Params& p, CUstream_st* stream);
void launch_bf16_hd192(const Params& p, CUstream_st* stream);
void launch_bf16_hd256(const Params& p, CUstream_st* stream);
void launch_fp16_hd64(const Params& p, CUstream_st* stream);
void launch_fp16_hd96(const Params& p, CUstream_st* stream);
void launch_fp16_hd128(const Params& p, CUstream_st* stream);
void launch_fp16_hd192x128(const Params& p, CUstream_st* stream);
void launch_fp16_hd192(const Params& p, CUstream_st* stream);
void launch_fp16_hd256(const Params& p, CUstream_st* stream);
void launch_e4m3_hd128(const Params& p, CUstream_st* stream);
void launch_e4m3_hd192(const Params& p, CUstream_st* stream);
void launch_e4m3_hd256(const Params& p, CUstream_st* stream);

}  // namespace attnops::fmha::sm90
