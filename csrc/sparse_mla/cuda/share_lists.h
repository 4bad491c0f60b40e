#pragma once
#include "sparse_mla/share_lists.h"

struct CUstream_st;

namespace attnops::sparse_mla {

void launch_share_lists(const ShareParams& params, CUstream_st* stream);

}  // namespace attnops::sparse_mla
