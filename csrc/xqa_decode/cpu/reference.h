#pragma once
#include <cmath>
#include <cstring>

#include "core/math.h"
#include "cpu/convert.h"
#include "xqa_decode/cpu/tile.h"

// The definition of right for a tile kernel: plain loops, for every dtype and head dim and for processors without AVX2.
namespace attnops::xqa_decode::cpu::reference {

using attnops::cpu::from_float;
using attnops::cpu::to_float;

inline int q_row_bytes(int head_dim) { return head_dim * static_cast<int>(sizeof(float)); }
inline int acc_stride(int head_dim) { return head_dim; }
inline int scratch_bytes(int) { return kTileTokens * static_cast<int>(sizeof(float)); }

template <typename T>
void pack_q(const void* q_row, int head_dim, char* packed) {
  for (int d = 0; d < head_dim; ++d) {
    const float value = to_float(static_cast<const T*>(q_row)[d]);
    std::memcpy(packed + d * sizeof(float), &value, sizeof(float));
  }
}

template <typename Kv>
float score_of(const Tile& tile, const float* q, int token) {
  const Kv* k = reinterpret_cast<const Kv*>(tile.k_rows[token]);
  float dot = 0.f;
  for (int d = 0; d < tile.head_dim; ++d) dot += q[d] * to_float(k[d]);
  const float scaled = tile.score_scale * dot;
  return tile.score_cap == 0.f ? scaled : tile.score_cap * tanhf(scaled);
}

template <typename Kv>
void attend_row(const Tile& tile, int row) {
  const float* q = reinterpret_cast<const float*>(tile.q) + static_cast<int64_t>(row) * tile.head_dim;
  float* acc = tile.acc + static_cast<int64_t>(row) * tile.head_dim;
  float* scores = reinterpret_cast<float*>(tile.scratch);
  const auto sees = [&](int token) { return tile.visible == nullptr || (tile.visible[row] >> token & 1) != 0; };

  float row_max = tile.row_max[row];
  for (int t = 0; t < tile.num_tokens; ++t) {
    if (!sees(t)) continue;
    scores[t] = score_of<Kv>(tile, q, t);
    row_max = fmaxf(row_max, scores[t]);
  }
  if (row_max == -INFINITY) return;  // nothing visible yet
  const float rescale = exp2f(tile.row_max[row] - row_max);
  for (int d = 0; d < tile.head_dim; ++d) acc[d] *= rescale;
  float sum = tile.row_sum[row] * rescale;
  for (int t = 0; t < tile.num_tokens; ++t) {
    if (!sees(t)) continue;
    const float p = exp2f(scores[t] - row_max);
    const Kv* v = reinterpret_cast<const Kv*>(tile.v_rows[t]);
    for (int d = 0; d < tile.head_dim; ++d) acc[d] += p * to_float(v[d]);
    sum += p;
  }
  tile.row_max[row] = row_max;
  tile.row_sum[row] = sum;
}

template <typename Kv>
void attend(const Tile& tile) {
  for (int row = 0; row < tile.num_rows; ++row) attend_row<Kv>(tile, row);
}

template <typename T>
void store(const float* acc, int head_dim, float factor, void* out) {
  for (int d = 0; d < head_dim; ++d) static_cast<T*>(out)[d] = from_float<T>(acc[d] * factor);
}

inline void store_partial(const float* acc, int head_dim, float factor, float* out) {
  for (int d = 0; d < head_dim; ++d) out[d] = acc[d] * factor;
}

template <typename T>
void round(const float* row, int head_dim, void* out) {
  store<T>(row, head_dim, 1.f, out);
}

template <typename T, typename Kv>
inline constexpr TileKernel kKernel{q_row_bytes, acc_stride, scratch_bytes, pack_q<T>,
                                    attend<Kv>,  store<T>,   store_partial, round<T>};

}  // namespace attnops::xqa_decode::cpu::reference
