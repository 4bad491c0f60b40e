#pragma once
#include "fmha/params.h"

struct CUstream_st;

// Kernels of sm_80 and every later architecture.
namespace attnops::fmha {

void launch_bf16_hd64(const Params& p, CUstream_st* stream);
void launch_bf16_hd96(const Params& p, CUstream_st* stream);
void launch_bf16_hd128(const Params& p, CUstream_st* stream);
void launch_bf16_hd192x128(const Params& p, CUstream_st* stream);
void launch_bf16_hd256(const Params& p, CUstream_st* stream);
void launch_fp16_hd64(const Params& p, CUstream_st* stream);
void launch_fp16_hd96(const Params& p, CUstream_st* stream);
void launch_fp16_hd128(const Params& p, CUstream_st* stream);
void launch_fp16_hd192x128(const Params& p, CUstream_st* stream);
void launch_fp16_hd256(const Params& p, CUstream_st* stream);
void launch_fp32(const Params& p, CUstream_st* stream);

}  // namespace attnops::fmha
