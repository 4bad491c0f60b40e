#pragma once
#include "xqa_decode/params.h"

struct CUstream_st;

namespace attnops::xqa_decode::sm90 {

// <type of the products>_<type of the pages>_hd<head dim, rounded up>. Each is defined by one file.
void launch_cluster_bf16_hd64(const Params& params, CUstream_st* stream);
void launch_cluster_fp8_hd128(const Params& params, CUstream_st* stream);

}  // namespace attnops::xqa_decode::sm90
