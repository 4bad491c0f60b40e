#pragma once
#include "xqa_decode/params.h"

struct CUstream_st;

namespace attnops::xqa_decode::sm90 {

// <type>_hd<head dim, rounded up>. Each is defined by one file.
void launch_cluster_wgmma_bf16_hd64(const Params& params, CUstream_st* stream);
void launch_cluster_wgmma_bf16_hd128(const Params& params, CUstream_st* stream);
void launch_cluster_wgmma_bf16_hd192(const Params& params, CUstream_st* stream);
void launch_cluster_wgmma_fp16_hd128(const Params& params, CUstream_st* stream);

// Over e4m3 pages.
void launch_cluster_wgmma_fp8_hd64(const Params& params, CUstream_st* stream);
void launch_cluster_wgmma_fp8_hd128(const Params& params, CUstream_st* stream);

// Pages that are too small for the copy engine's boxes.
void launch_cluster_gather_bf16_hd64(const Params& params, CUstream_st* stream);
void launch_cluster_gather_bf16_hd128(const Params& params, CUstream_st* stream);
void launch_cluster_gather_fp16_hd128(const Params& params, CUstream_st* stream);
void launch_cluster_gather_fp8_hd64(const Params& params, CUstream_st* stream);
void launch_cluster_gather_fp8_hd128(const Params& params, CUstream_st* stream);

}  // namespace attnops::xqa_decode::sm90
