#pragma once
#include "xqa_decode/params.h"

struct CUstream_st;

namespace attnops::xqa_decode {

// <type of the products>_<type of the pages>_hd<head dim, rounded up>. Each is defined by one file.
void launch_bf16_hd64(const Params& params, CUstream_st* stream);
void launch_bf16_hd128(const Params& params, CUstream_st* stream);
void launch_bf16_hd256(const Params& params, CUstream_st* stream);
void launch_fp16_hd64(const Params& params, CUstream_st* stream);
void launch_fp16_hd128(const Params& params, CUstream_st* stream);
void launch_fp16_hd256(const Params& params, CUstream_st* stream);
void launch_fp8_hd64(const Params& params, CUstream_st* stream);
void launch_fp8_hd128(const Params& params, CUstream_st* stream);
void launch_fp8_hd256(const Params& params, CUstream_st* stream);
void launch_e5m2_hd64(const Params& params, CUstream_st* stream);
void launch_e5m2_hd128(const Params& params, CUstream_st* stream);
void launch_e5m2_hd256(const Params& params, CUstream_st* stream);
void launch_fp32(const Params& params, CUstream_st* stream);  // any head dim

}  // namespace attnops::xqa_decode
