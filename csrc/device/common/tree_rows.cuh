#pragma once
#include <cstdint>

#include "core/math.h"

namespace attnops {

// Whether some row of the request sees draft `draft`, by the fields that the decode ops' Params have in common. Of one
// that none sees neither K nor V may be read: its probability is zero, but 0 x NaN is not. Mostly a token sees itself,
// and one look is enough.
template <class Params>
__device__ __noinline__ bool some_row_sees(const Params& p, int request, int draft) {
  const uint8_t* column = p.tree_mask + request * p.tree_mask_stride_request + draft / 8;
  const auto sees = [&](int row) { return (column[row * p.tree_mask_stride_token] >> (draft % 8) & 1) != 0; };
  if (draft < p.seqlen_q && sees(draft)) return true;
  const int rows = p.window_left < 0 ? p.seqlen_q : min_of(p.seqlen_q - 1, draft + p.window_left) + 1;
#pragma unroll 1
  for (int row = 0; row < rows; ++row) {
    if (sees(row)) return true;
  }
  return false;
}

}  // namespace attnops
