#pragma once
#include "fp4_kv/params.h"

struct CUstream_st;

namespace attnops::fp4_kv::sm90 {

// MLA; pages of whole tiles of 64 keys, rows on 16-byte boundaries.
void launch_bf16_latents(const DecodeParams& params, CUstream_st* stream);
void launch_fp16_latents(const DecodeParams& params, CUstream_st* stream);

}  // namespace attnops::fp4_kv::sm90
