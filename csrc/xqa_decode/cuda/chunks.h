#pragma once
#include "xqa_decode/chunks.h"

struct CUstream_st;

namespace attnops::xqa_decode {

// Writes the chunks of a batch. More than there is room for are left out: their rows are then behind the last request.
void launch_chunks(const ChunkParams& params, CUstream_st* stream);

}  // namespace attnops::xqa_decode
