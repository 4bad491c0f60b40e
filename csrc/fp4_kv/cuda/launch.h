#pragma once
#include "fp4_kv/params.h"

struct CUstream_st;

namespace attnops::fp4_kv {

void launch(const StoreParams& params, CUstream_st* stream);
void launch(const DecodeParams& params, CUstream_st* stream);  // by the first kernel that takes them: impls.cpp

// <type of q>_hd<head dim>_rows<query rows, at most>; latents: of MLA.
void launch_bf16_hd128_rows8(const DecodeParams& params, CUstream_st* stream);
void launch_bf16_hd128_rows16(const DecodeParams& params, CUstream_st* stream);
void launch_bf16_hd64_rows8(const DecodeParams& params, CUstream_st* stream);
void launch_bf16_hd64_rows16(const DecodeParams& params, CUstream_st* stream);
void launch_fp16_hd128_rows8(const DecodeParams& params, CUstream_st* stream);
void launch_fp16_hd128_rows16(const DecodeParams& params, CUstream_st* stream);
void launch_fp16_hd64_rows8(const DecodeParams& params, CUstream_st* stream);
void launch_fp16_hd64_rows16(const DecodeParams& params, CUstream_st* stream);
void launch_bf16_latents(const DecodeParams& params, CUstream_st* stream);
void launch_fp16_latents(const DecodeParams& params, CUstream_st* stream);

// Merges the shares that a kernel has left, for either type of q.
void launch_merge(const DecodeParams& params, CUstream_st* stream);

}  // namespace attnops::fp4_kv
