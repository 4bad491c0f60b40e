#pragma once
#include "xqa_decode/params.h"

struct CUstream_st;

namespace attnops::xqa_decode::sm90 {

// <type>_hd<head dim, rounded up>. Each is defined by one file.
void launch_bf16_hd64(const Params& params, CUstream_st* stream);
void launch_bf16_hd128(const Params& params, CUstream_st* stream);
void launch_bf16_hd192(const Params& params, CUstream_st* stream);
void launch_bf16_hd256(const Params& params, CUstream_st* stream);
void launch_fp16_hd64(const Params& params, CUstream_st* stream);
void launch_fp16_hd128(const Params& params, CUstream_st* stream);
void launch_fp16_hd192(const Params& params, CUstream_st* stream);
void launch_fp16_hd256(const Params& params, CUstream_st* stream);

// The same for pages that are too small for the copy engine's boxes.
void launch_gather_bf16_hd64(const Params& params, CUstream_st* stream);
void launch_gather_fp16_hd64(const Params& params, CUstream_st* stream);
void launch_gather_bf16_hd128(const Params& params, CUstream_st* stream);
void launch_gather_fp16_hd128(const Params& params, CUstream_st* stream);
void launch_gather_bf16_hd256(const Params& params, CUstream_st* stream);
void launch_gather_fp16_hd256(const Params& params, CUstream_st* stream);

// Over e4m3 pages. Head dims up to 128 have two kernels more, for up to 16 rows (fp8/).
void launch_fp8_hd64(const Params& params, CUstream_st* stream);
void launch_fp8_hd128(const Params& params, CUstream_st* stream);
void launch_gather_fp8_hd64(const Params& params, CUstream_st* stream);
void launch_gather_fp8_hd128(const Params& params, CUstream_st* stream);
void launch_fp8_hd256(const Params& params, CUstream_st* stream);
void launch_gather_fp8_hd256(const Params& params, CUstream_st* stream);

// Ragged requests of few rows, over boxes and over gathered rows.
void launch_ragged_bf16_hd64(const Params& params, CUstream_st* stream);
void launch_ragged_gather_bf16_hd64(const Params& params, CUstream_st* stream);
void launch_ragged_bf16_hd128(const Params& params, CUstream_st* stream);
void launch_ragged_gather_bf16_hd128(const Params& params, CUstream_st* stream);
void launch_ragged_bf16_hd192(const Params& params, CUstream_st* stream);
void launch_ragged_bf16_hd256(const Params& params, CUstream_st* stream);
void launch_ragged_gather_bf16_hd256(const Params& params, CUstream_st* stream);
void launch_ragged_fp16_hd64(const Params& params, CUstream_st* stream);
void launch_ragged_gather_fp16_hd64(const Params& params, CUstream_st* stream);
void launch_ragged_fp16_hd128(const Params& params, CUstream_st* stream);
void launch_ragged_gather_fp16_hd128(const Params& params, CUstream_st* stream);
void launch_ragged_fp16_hd192(const Params& params, CUstream_st* stream);
void launch_ragged_fp16_hd256(const Params& params, CUstream_st* stream);
void launch_ragged_gather_fp16_hd256(const Params& params, CUstream_st* stream);
void launch_ragged_fp8_hd64(const Params& params, CUstream_st* stream);
void launch_ragged_gather_fp8_hd64(const Params& params, CUstream_st* stream);
void launch_ragged_fp8_hd128(const Params& params, CUstream_st* stream);
void launch_ragged_gather_fp8_hd128(const Params& params, CUstream_st* stream);
void launch_ragged_fp8_hd256(const Params& params, CUstream_st* stream);
void launch_ragged_gather_fp8_hd256(const Params& params, CUstream_st* stream);

}  // namespace attnops::xqa_decode::sm90
