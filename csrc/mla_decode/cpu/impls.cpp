#include "mla_decode/cpu/impls.h"

#include "mla_decode/cpu/reference.h"

namespace attnops::mla_decode::cpu {

RunPiece select_kernel(const Params&) { return &run_reference; }

}  // namespace attnops::mla_decode::cpu
