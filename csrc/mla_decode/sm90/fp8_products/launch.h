#pragma once
#include "mla_decode/params.h"

struct CUstream_st;

namespace attnops::mla_decode::sm90::fp8_products {

// Attention over dense e4m3 caches on the e4m3 units, then the merge of what parts share. bf16 queries and the
// probabilities are rounded to e4m3.
void launch_bf16_rounded(const Params& p, CUstream_st* stream);

}  // namespace attnops::mla_decode::sm90::fp8_products
