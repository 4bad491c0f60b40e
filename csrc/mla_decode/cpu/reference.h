#pragma once
#include "mla_decode/cpu/pieces.h"

// The definition of right: plain loops in float32 over what a piece of the plan holds. Also what runs where no faster
// instruction set is.
namespace attnops::mla_decode::cpu {

void run_reference(const Params& p, const Piece& piece, const attnops::cpu::TileOps* = nullptr);

}  // namespace attnops::mla_decode::cpu
