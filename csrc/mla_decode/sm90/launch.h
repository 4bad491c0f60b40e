#pragma once
#include "mla_decode/params.h"

struct CUstream_st;

namespace attnops::mla_decode::sm90 {

// Attention over the parts of the plan, then the merge of what parts share.
void launch_bf16(const Params& p, CUstream_st* stream);
void launch_fp16(const Params& p, CUstream_st* stream);

// The same by three tiles in flight, where ring/limits.h says so.
void launch_ring_bf16(const Params& p, CUstream_st* stream);
void launch_ring_fp16(const Params& p, CUstream_st* stream);

// Rows that lists select; without a plan each work is one piece.
void launch_selected_bf16(const Params& p, CUstream_st* stream);
void launch_selected_fp16(const Params& p, CUstream_st* stream);

}  // namespace attnops::mla_decode::sm90
