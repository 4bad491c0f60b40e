#pragma once
#include "sparse_indexer/params.h"

struct CUstream_st;

namespace attnops::sparse_indexer {

// The first kernel that fits, by the heads rounded up.
void launch_logits(const char* op, const LogitsParams& params, CUstream_st* stream);

}  // namespace attnops::sparse_indexer
