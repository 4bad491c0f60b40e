#pragma once
#include "mla_decode/params.h"

struct CUstream_st;

namespace attnops::mla_decode {

// Lists of rows of every kind, on any GPU with mma.sync (sm_80 and later).
void launch_lists_bf16(const Params& p, CUstream_st* stream);
void launch_lists_fp16(const Params& p, CUstream_st* stream);

// Shared memory of a CTA in bytes, for that many heads.
int lists_shared_bytes(int num_q_heads);

}  // namespace attnops::mla_decode
