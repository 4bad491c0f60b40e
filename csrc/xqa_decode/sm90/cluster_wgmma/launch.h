#pragma once
#include "xqa_decode/params.h"

namespace attnops::xqa_decode::sm90 {

// <type>_hd<head dim, rounded up>. Each is defined by one file.
LaunchFunction launch_cluster_wgmma_bf16_hd64, launch_cluster_wgmma_bf16_hd128, launch_cluster_wgmma_bf16_hd192,
    launch_cluster_wgmma_fp16_hd128;

// Over e4m3 pages.
LaunchFunction launch_cluster_wgmma_fp8_hd64, launch_cluster_wgmma_fp8_hd128;

// Pages that are too small for the copy engine's boxes.
LaunchFunction launch_cluster_gather_bf16_hd64, launch_cluster_gather_bf16_hd128, launch_cluster_gather_fp16_hd128,
    launch_cluster_gather_fp8_hd64, launch_cluster_gather_fp8_hd128;

// More rows, of short calls.
LaunchFunction launch_cluster_blocks_bf16_hd128, launch_cluster_blocks_fp8_hd128,
    launch_cluster_blocks_gather_bf16_hd128, launch_cluster_blocks_gather_fp8_hd128;

}  // namespace attnops::xqa_decode::sm90
