#pragma once
#include <cstdint>

#include "core/types.h"

namespace attnops::merge_state {

// All that a merge kernel, on any device, may know. Strides are in elements; dim -1 has stride 1.
struct Params {
  int64_t num_tokens;
  int num_heads, head_dim;

  // One partial result over a set of keys that no other side holds.
  struct Side {
    const void* out;   // [num_tokens, num_heads, head_dim], of `dtype`
    const float* lse;  // [num_tokens, num_heads], contiguous
    int64_t out_stride_token, out_stride_head;
  } a, b;

  void* out;   // [num_tokens, num_heads, head_dim], of `dtype`
  float* lse;  // [num_tokens, num_heads], contiguous
  int64_t out_stride_token, out_stride_head;

  DType dtype;  // of a.out, b.out and out
};

// n partial results at once.
struct ManyParams {
  int64_t num_tokens;
  int num_states, num_heads, head_dim;

  const void* outs;   // [num_states, num_tokens, num_heads, head_dim], of `dtype`
  const float* lses;  // [num_states, num_tokens, num_heads], contiguous
  int64_t outs_stride_state, outs_stride_token, outs_stride_head;

  void* out;   // [num_tokens, num_heads, head_dim], of `dtype`
  float* lse;  // [num_tokens, num_heads], contiguous
  int64_t out_stride_token, out_stride_head;

  DType dtype;  // of outs and out
};

}  // namespace attnops::merge_state
