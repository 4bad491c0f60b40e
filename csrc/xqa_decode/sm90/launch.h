#pragma once
#include "xqa_decode/params.h"

namespace attnops::xqa_decode::sm90 {

// <type>_hd<head dim, rounded up>. Each is defined by one file.
LaunchFunction launch_bf16_hd64, launch_bf16_hd128, launch_bf16_hd192, launch_bf16_hd256, launch_fp16_hd64,
    launch_fp16_hd128, launch_fp16_hd192, launch_fp16_hd256;

// The same for pages that are too small for the copy engine's boxes.
LaunchFunction launch_gather_bf16_hd64, launch_gather_fp16_hd64, launch_gather_bf16_hd128, launch_gather_fp16_hd128,
    launch_gather_bf16_hd256, launch_gather_fp16_hd256;

// Over e4m3 pages. Head dims up to 128 have two kernels more, for up to 16 rows (fp8/).
LaunchFunction launch_fp8_hd64, launch_fp8_hd128, launch_gather_fp8_hd64, launch_gather_fp8_hd128, launch_fp8_hd256,
    launch_gather_fp8_hd256;

// Ragged requests of few rows, over boxes and over gathered rows.
LaunchFunction launch_ragged_bf16_hd64, launch_ragged_gather_bf16_hd64, launch_ragged_bf16_hd128,
    launch_ragged_gather_bf16_hd128, launch_ragged_bf16_hd192, launch_ragged_bf16_hd256,
    launch_ragged_gather_bf16_hd256, launch_ragged_fp16_hd64, launch_ragged_gather_fp16_hd64, launch_ragged_fp16_hd128,
    launch_ragged_gather_fp16_hd128, launch_ragged_fp16_hd192, launch_ragged_fp16_hd256,
    launch_ragged_gather_fp16_hd256, launch_ragged_fp8_hd64, launch_ragged_gather_fp8_hd64, launch_ragged_fp8_hd128,
    launch_ragged_gather_fp8_hd128, launch_ragged_fp8_hd256, launch_ragged_gather_fp8_hd256;

}  // namespace attnops::xqa_decode::sm90
