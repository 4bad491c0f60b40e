#pragma once
#include "mla_decode/params.h"

struct CUstream_st;

namespace attnops::mla_decode::sm90::fp8_fragments {

inline constexpr int kFewRows = 16;  // query rows (token, head) of a request: faster than products of e4m3

// Attention over the parts of the plan, then the merge of what parts share. Dense: 576 e4m3 a token and one scale;
// rows: 656 bytes a token with scales of their own. Few: up to kFewRows rows.
void launch_few_dense_bf16(const Params& p, CUstream_st* stream);
void launch_few_dense_fp16(const Params& p, CUstream_st* stream);
void launch_few_rows_bf16(const Params& p, CUstream_st* stream);
void launch_few_rows_fp16(const Params& p, CUstream_st* stream);
void launch_dense_bf16(const Params& p, CUstream_st* stream);
void launch_dense_fp16(const Params& p, CUstream_st* stream);
void launch_rows_bf16(const Params& p, CUstream_st* stream);
void launch_rows_fp16(const Params& p, CUstream_st* stream);

// Rows of 656 bytes that lists select; without a plan each work is one piece.
void launch_selected_bf16(const Params& p, CUstream_st* stream);
void launch_selected_fp16(const Params& p, CUstream_st* stream);

// Rows of 584 bytes, of one list or two.
void launch_shared_bf16(const Params& p, CUstream_st* stream);
void launch_shared_fp16(const Params& p, CUstream_st* stream);

}  // namespace attnops::mla_decode::sm90::fp8_fragments
