#pragma once
#include "core/softmax_state.h"
#include "cpu/convert.h"
#include "merge_state/params.h"

// The definition of right, and the production kernel too: a merge is bound by memory, and the compiler vectorizes the
// inner loops. Both functions take a range of tokens, so that the caller splits the work over its threads.
namespace attnops::merge_state::cpu {

using attnops::cpu::from_float;
using attnops::cpu::to_float;

template <typename T>
void merge_tokens(const Params& p, int64_t begin, int64_t end) {
  const auto row_of = [](const Params::Side& side, int64_t token, int head) {
    return static_cast<const T*>(side.out) + token * side.out_stride_token + head * side.out_stride_head;
  };
  for (int64_t token = begin; token < end; ++token) {
    for (int head = 0; head < p.num_heads; ++head) {
      const int64_t row = token * p.num_heads + head;
      const MergeWeights w = merge_weights(p.a.lse[row], p.b.lse[row]);
      const T* a = row_of(p.a, token, head);
      const T* b = row_of(p.b, token, head);
      T* out = static_cast<T*>(p.out) + token * p.out_stride_token + head * p.out_stride_head;
      for (int d = 0; d < p.head_dim; ++d) out[d] = from_float<T>(merge_value(w, to_float(a[d]), to_float(b[d])));
      p.lse[row] = w.lse;
    }
  }
}

// One row of the merge of n states. States with -inf have no keys and are not read; no state at all gives zeros.
template <typename T>
void merge_row_of_many(const ManyParams& p, int64_t token, int head) {
  const int64_t row = token * p.num_heads + head;
  const int64_t rows = p.num_tokens * p.num_heads;
  float lse_max = -INFINITY;
  for (int s = 0; s < p.num_states; ++s) lse_max = fmaxf(lse_max, p.lses[s * rows + row]);
  float sum = 0.f;
  for (int s = 0; s < p.num_states && lse_max > -INFINITY; ++s) sum += expf(p.lses[s * rows + row] - lse_max);
  p.lse[row] = sum > 0.f ? lse_max + logf(sum) : -INFINITY;

  T* out = static_cast<T*>(p.out) + token * p.out_stride_token + head * p.out_stride_head;
  const T* first = static_cast<const T*>(p.outs) + token * p.outs_stride_token + head * p.outs_stride_head;
  for (int d = 0; d < p.head_dim; ++d) {
    float total = 0.f;
    for (int s = 0; s < p.num_states && sum > 0.f; ++s) {
      const float weight = expf(p.lses[s * rows + row] - lse_max) / sum;
      total += weighted(weight, to_float(first[s * p.outs_stride_state + d]));
    }
    out[d] = from_float<T>(total);
  }
}

template <typename T>
void merge_many_tokens(const ManyParams& p, int64_t begin, int64_t end) {
  for (int64_t token = begin; token < end; ++token) {
    for (int head = 0; head < p.num_heads; ++head) merge_row_of_many<T>(p, token, head);
  }
}

}  // namespace attnops::merge_state::cpu
