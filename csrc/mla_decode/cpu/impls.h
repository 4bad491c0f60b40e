#pragma once
#include "mla_decode/cpu/pieces.h"

namespace attnops::mla_decode::cpu {

// The kernel for these arguments on this processor.
RunPiece select_kernel(const Params& p);

}  // namespace attnops::mla_decode::cpu
