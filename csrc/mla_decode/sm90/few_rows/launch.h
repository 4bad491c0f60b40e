#pragma once
#include "mla_decode/params.h"

struct CUstream_st;

namespace attnops::mla_decode::sm90::few_rows {

inline constexpr int kMaxRows = 32;  // query rows (token, head) of a request

// Attention over the parts of the plan, then the merge of what parts share.
void launch_bf16(const Params& p, CUstream_st* stream);
void launch_fp16(const Params& p, CUstream_st* stream);

// Rows of 576 or 512 values that lists select; without a plan each work is one piece.
void launch_selected_bf16(const Params& p, CUstream_st* stream);
void launch_selected_fp16(const Params& p, CUstream_st* stream);

}  // namespace attnops::mla_decode::sm90::few_rows
