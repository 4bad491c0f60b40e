#pragma once
#include "mla_decode/cpu/pieces.h"

// The definition of right: plain loops in float32 over what a piece of the plan holds. Also what runs where no faster
// instruction set is.
namespace attnops::mla_decode::cpu {

void run_reference(const Params& p, const Piece& piece);

// One key's 576 values as float32: the pool's row times its scales, except kv_scale, which belongs to the scores and
// to the output. `key` is a row of the pool.
void load_key(const Params& p, const uint8_t* key, float* values);

}  // namespace attnops::mla_decode::cpu
