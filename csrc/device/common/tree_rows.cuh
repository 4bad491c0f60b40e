#pragma once
#include <cstdint>

#include "core/tree_window.h"

namespace attnops {

// The first key in the window of query token `token`, where there are a window and a tree mask; `first_draft`: the key
// that the mask's first bit is of.
template <class Params>
__device__ __forceinline__ int draft_window_begin(const Params& p, int request, int token, int first_draft) {
  const uint8_t* row = p.tree_mask + request * p.tree_mask_stride_request + token * p.tree_mask_stride_token;
  const int64_t begin = tree_window_begin(row, p.tree_keys, first_draft, p.window_left);
  return static_cast<int>(max_of<int64_t>(begin, 0));
}

// Whether some row of the request sees draft `draft`, by the fields that the decode ops' Params have in common. Of one
// that none sees neither K nor V may be read: its probability is zero, but 0 x NaN is not. Mostly a token sees itself,
// and one look is enough.
template <class Params>
__device__ __noinline__ bool some_row_sees(const Params& p, int request, int draft) {
  const uint8_t* column = p.tree_mask + request * p.tree_mask_stride_request + draft / 8;
  const auto has_bit = [&](int row) { return (column[row * p.tree_mask_stride_token] >> (draft % 8) & 1) != 0; };
  const auto in_window = [&](int row) { return p.window_left < 0 || draft >= draft_window_begin(p, request, row, 0); };
  if (draft < p.seqlen_q && has_bit(draft) && in_window(draft)) return true;
  if (p.window_left < 0) {  // bytes of several rows come at once
    unsigned seen = 0;
#pragma unroll 1
    for (int row = 0; row < p.seqlen_q; ++row) seen |= column[row * p.tree_mask_stride_token];
    return (seen >> (draft % 8) & 1) != 0;
  }
#pragma unroll 1
  for (int row = 0; row < p.seqlen_q; ++row) {
    if (has_bit(row) && in_window(row)) return true;
  }
  return false;
}

}  // namespace attnops
