#pragma once
#include "xqa_decode/params.h"

namespace attnops::xqa_decode {

// <type of the products>_<type of the pages>_hd<head dim, rounded up>. Each is defined by one file.
LaunchFunction launch_bf16_hd64, launch_bf16_hd128, launch_bf16_hd256, launch_fp16_hd64, launch_fp16_hd128,
    launch_fp16_hd256, launch_fp8_hd64, launch_fp8_hd128, launch_fp8_hd256, launch_e5m2_hd64, launch_e5m2_hd128,
    launch_e5m2_hd256;
LaunchFunction launch_fp32;  // any head dim

}  // namespace attnops::xqa_decode
