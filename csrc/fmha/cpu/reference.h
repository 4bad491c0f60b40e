#pragma once
#include <cmath>
#include <vector>

#include "cpu/convert.h"
#include "fmha/cpu/work.h"

// The definition of right, in plain loops, and the kernel of processors without AVX2 and of e5m2 keys.
namespace attnops::fmha::cpu {

using attnops::cpu::from_float;
using attnops::cpu::to_float;

// T: of q and out; Kv: of k and v.
template <typename T, typename Kv>
void reference_row(const Params& p, const Work& w, int row) {
  const int token = w.token(row);
  const KeyRange range = keys_of(p, w.request, token);
  const KeyRange hidden_keys = hidden_from(p, w.request, token);
  const int num_keys = range.end - range.begin;
  std::vector<const void*> k_rows(num_keys), v_rows(num_keys);
  gather_rows(p, w.request, w.kv_head, range.begin, range.end, k_rows.data(), v_rows.data());

  const T* q = static_cast<const T*>(query_row(p, w, row));
  const float scale = p.softmax_scale * scale_of(p.k_scale, p.k_scale_stride, w.kv_head);
  std::vector<float> scores(num_keys, -INFINITY);
  float largest = -INFINITY;
  for (int j = 0; j < num_keys; ++j) {
    const int key = range.begin + j;
    const bool hidden =
        (p.tree_mask && !tree_allows(p, w.request, token, key)) || (key >= hidden_keys.begin && key < hidden_keys.end);
    if (hidden || k_rows[j] == nullptr) continue;
    const Kv* k = static_cast<const Kv*>(k_rows[j]);
    float score = 0.f;
    for (int d = 0; d < p.head_dim_qk; ++d) score += to_float(q[d]) * to_float(k[d]);
    score *= scale;
    if (p.logit_cap > 0.f) score = p.logit_cap * std::tanh(score / p.logit_cap);
    scores[j] = score;
    largest = fmaxf(largest, score);
  }

  float sum = 0.f;
  std::vector<float> acc(p.head_dim_v, 0.f);
  for (int j = 0; j < num_keys; ++j) {
    if (scores[j] == -INFINITY) continue;  // not visible: its value is not read
    const float weight = std::exp(scores[j] - largest);
    const Kv* v = static_cast<const Kv*>(v_rows[j]);
    for (int d = 0; d < p.head_dim_v; ++d) acc[d] += weight * to_float(v[d]);
    sum += weight;
  }
  const float factor = finish_row(p, w, row, largest, sum);
  T* out = static_cast<T*>(out_row(p, w, row));
  for (int d = 0; d < p.head_dim_v; ++d) out[d] = from_float<T>(factor == 0.f ? 0.f : factor * acc[d]);
}

template <typename T>
void reference_item(const Params& p, const Work& w) {
  for (int row = 0; row < w.num_rows; ++row) {
    if (p.kv_dtype == DType::kFloat8E4M3) {
      reference_row<T, attnops::cpu::Float8E4M3>(p, w, row);
    } else if (p.kv_dtype == DType::kFloat8E5M2) {
      reference_row<T, attnops::cpu::Float8E5M2>(p, w, row);
    } else {
      reference_row<T, T>(p, w, row);
    }
  }
}

inline void run_reference(const Params& p, const Work& w) {
  if (p.dtype == DType::kFloat32) return reference_item<float>(p, w);
  if (p.dtype == DType::kFloat16) return reference_item<attnops::cpu::Float16>(p, w);
  reference_item<attnops::cpu::BFloat16>(p, w);
}

}  // namespace attnops::fmha::cpu
