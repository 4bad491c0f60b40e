#pragma once
#include "mla_decode/cpu/pieces.h"

namespace attnops::mla_decode::cpu {

// A piece of the plan as matrix products of packed tiles, on any instruction set that has TileOps.
void run_tiled(const Params& p, const Piece& piece, const attnops::cpu::TileOps* ops);

// The kernel for these arguments on this processor: run_tiled with the best instruction set, or the reference.
Kernel select_kernel(const Params& p);

}  // namespace attnops::mla_decode::cpu
