#pragma once
#include <cstdint>

#include "core/tree_window.h"

namespace attnops {

// What a draft's rows must know of a call. Functions out of line take it by value: through a reference they would read
// a kernel's parameters from memory, word after word.
struct TreeRules {
  const uint8_t* tree_mask;
  int64_t tree_mask_stride_request, tree_mask_stride_token;
  int tree_keys, window_left, seqlen_q;

  template <class Params>
  __device__ __forceinline__ explicit TreeRules(const Params& p)
      : tree_mask(p.tree_mask),
        tree_mask_stride_request(p.tree_mask_stride_request),
        tree_mask_stride_token(p.tree_mask_stride_token),
        tree_keys(p.tree_keys),
        window_left(p.window_left),
        seqlen_q(p.seqlen_q) {}
};

// The first key in the window of query token `token`, where there are a window and a tree mask; `first_draft`: the key
// that the mask's first bit is of.
template <class Params>
__device__ __forceinline__ int draft_window_begin(const Params& p, int request, int token, int first_draft) {
  const uint8_t* row = p.tree_mask + request * p.tree_mask_stride_request + token * p.tree_mask_stride_token;
  const int64_t begin = tree_window_begin(row, p.tree_keys, first_draft, p.window_left);
  return static_cast<int>(max_of<int64_t>(begin, 0));
}

// Which of 64 drafts from `first` on a row sees, a bit each; all below 0. The mask's bytes come at once.
__device__ __forceinline__ uint64_t seen_drafts(const uint8_t* row, int tree_keys, int first) {
  const int byte = first >> 3, shift = first & 7, last = (tree_keys - 1) / 8;
  uint32_t bytes[9];
#pragma unroll
  for (int i = 0; i < 9; ++i) bytes[i] = byte + i < 0 ? 0xffu : byte + i <= last ? row[byte + i] : 0u;
  const uint32_t low = bytes[0] | bytes[1] << 8 | bytes[2] << 16 | bytes[3] << 24;
  const uint32_t high = bytes[4] | bytes[5] << 8 | bytes[6] << 16 | bytes[7] << 24;
  return uint64_t{__funnelshift_r(high, bytes[8], shift)} << 32 | __funnelshift_r(low, high, shift);
}

// Whether some row of the request sees draft `draft`, of a decode op's request. Of one that none sees neither K
// nor V may be read: its probability is zero, but 0 x NaN is not. Mostly a token sees itself, and one look is enough.
__device__ __noinline__ inline bool some_row_sees(TreeRules p, int request, int draft) {
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
