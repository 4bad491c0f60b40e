#pragma once
#include "xqa_decode/params.h"

namespace attnops::xqa_decode::sm90 {

// Batch-invariant plans of up to 16 rows: <type>_hd<head dim, rounded up>, over boxes and over gathered rows. Two are
// defined by one file.
LaunchFunction launch_folds_bf16_hd64, launch_folds_gather_bf16_hd64, launch_folds_fp16_hd64,
    launch_folds_gather_fp16_hd64, launch_folds_fp8_hd64, launch_folds_gather_fp8_hd64, launch_folds_bf16_hd128,
    launch_folds_gather_bf16_hd128, launch_folds_fp16_hd128, launch_folds_gather_fp16_hd128, launch_folds_fp8_hd128,
    launch_folds_gather_fp8_hd128;

// The same of few works, by clusters.
LaunchFunction launch_cluster_folds_bf16_hd64, launch_cluster_folds_gather_bf16_hd64, launch_cluster_folds_fp8_hd64,
    launch_cluster_folds_gather_fp8_hd64, launch_cluster_folds_bf16_hd128, launch_cluster_folds_gather_bf16_hd128,
    launch_cluster_folds_fp16_hd128, launch_cluster_folds_gather_fp16_hd128, launch_cluster_folds_fp8_hd128,
    launch_cluster_folds_gather_fp8_hd128;

}  // namespace attnops::xqa_decode::sm90
