#pragma once
#include <algorithm>
#include <limits>

#include "block_lists/label_scores.h"
#include "cpu/convert.h"

namespace attnops::block_lists::cpu {

// The scores of a request's keys [begin, end) for a KV head.
template <typename T>
void score_keys(const ScoreParams& p, int request, int head, int64_t begin, int64_t end) {
  using attnops::cpu::to_float;
  float* const row = p.scores + request * p.score_stride_request + head * p.score_stride_head;
  for (int64_t key = begin; key < end; ++key) {
    const int64_t place = label_place(p, request, head, static_cast<int>(key));
    float best = -std::numeric_limits<float>::infinity();
    for (int g = 0; g < p.group() && place >= 0; ++g) {
      const T* const q =
          static_cast<const T*>(p.q) + request * p.q_stride_request + (head * p.group() + g) * p.q_stride_head;
      const T* const label = static_cast<const T*>(p.labels) + place;
      float sum = 0.0f;
      for (int i = 0; i < p.num_channels; ++i) sum += to_float(q[i]) * to_float(label[i]);
      best = std::max(best, sum);
    }
    row[key] = best;
  }
}

}  // namespace attnops::block_lists::cpu
