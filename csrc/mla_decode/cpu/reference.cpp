#include "mla_decode/cpu/reference.h"

#include <cmath>
#include <cstring>

#include "cpu/convert.h"

namespace attnops::mla_decode::cpu {
namespace {

using attnops::cpu::BFloat16;
using attnops::cpu::Float16;
using attnops::cpu::Float8E4M3;
using attnops::cpu::Float8E5M2;

template <typename T>
void load_values(const uint8_t* source, int count, float* values) {
  for (int d = 0; d < count; ++d) {
    T value;
    std::memcpy(&value, source + d * sizeof(T), sizeof(T));  // rows of 656 bytes are only as aligned as their pool
    values[d] = attnops::cpu::to_float(value);
  }
}

void load_values_of(DType dtype, const uint8_t* source, int count, float* values) {
  switch (dtype) {
    case DType::kFloat16: return load_values<Float16>(source, count, values);
    case DType::kBFloat16: return load_values<BFloat16>(source, count, values);
    case DType::kFloat8E4M3: return load_values<Float8E4M3>(source, count, values);
    case DType::kFloat8E5M2: return load_values<Float8E5M2>(source, count, values);
    default: return load_values<float>(source, count, values);
  }
}

// One key's values as float32: the pool's row times its scales, except kv_scale, which belongs to the scores and to the
// output.
void load_key(const Params& p, const Key& key, float* values) {
  if (p.kv_dtype != DType::kUInt8) return load_values_of(p.kv_dtype, key.row, head_dim_qk(p), values);
  if (p.shared_rows) {
    load_values<Float8E4M3>(key.row, kSharedNope, values);
    for (int d = 0; d < kSharedNope; ++d) values[d] *= power_of_two(key.scales[d / kSharedScaleWidth]);
    return load_values<BFloat16>(key.row + kSharedNope, kHeadDimRope, values + kSharedNope);
  }
  float scales[4];
  std::memcpy(scales, key.row + kHeadDimV, sizeof(scales));
  load_values<Float8E4M3>(key.row, kHeadDimV, values);
  for (int d = 0; d < kHeadDimV; ++d) {
    values[d] *= scales[d / 128];
    if (key.rounded) values[d] = attnops::cpu::to_float(attnops::cpu::from_float<BFloat16>(values[d]));
  }
  load_values<BFloat16>(key.row + kHeadDimV + sizeof(scales), kHeadDimRope, values + kHeadDimV);
}

// Score of one row with one key, scaled and capped.
float score_of(const Params& p, const float* q, const float* key) {
  float dot = 0.f;
  for (int d = 0; d < head_dim_qk(p); ++d) dot += q[d] * key[d];
  const float score = dot * p.softmax_scale * (p.kv_scale ? *p.kv_scale : 1.f);
  return p.logit_cap > 0.f ? p.logit_cap * tanhf(score / p.logit_cap) : score;
}

// An online softmax over the keys of a row.
struct RowState {
  float max = -INFINITY, sum = 0.f;
  float out[kHeadDimV] = {};

  void add(float score, const float* value) {
    const float larger = fmaxf(max, score);
    if (larger == -INFINITY) return;  // a score of -inf has no weight
    const float keep = expf(max - larger), weight = expf(score - larger);
    max = larger;
    sum = sum * keep + weight;
    for (int d = 0; d < kHeadDimV; ++d) out[d] = out[d] * keep + weight * value[d];
  }
};

}  // namespace

void run_reference(const Params& p, const Piece& piece, const attnops::cpu::TileOps*) {
  for (int row = 0; row < piece.num_rows; ++row) {
    const RowPlace place = row_place(p, piece, row);
    float q[kHeadDimQk], key[kHeadDimQk];
    load_values_of(p.dtype, place.q, kHeadDimV, q);
    if (!p.shared_rows) load_values_of(p.dtype, place.q_pe, kHeadDimRope, q + kHeadDimV);

    RowState state;
    for (int t = piece.first_tile; t < piece.first_tile + piece.num_tiles; ++t) {
      const KeyTile tile = key_tile(p, piece, t);
      for (int k = 0; k < kPlanTileTokens; ++k) {
        if (tile.key[k].row == nullptr || !(tile.visible[row] >> k & 1)) continue;
        load_key(p, tile.key[k], key);
        state.add(score_of(p, q, key), key);
      }
    }
    const float factor = state.sum != 0.f ? (p.kv_scale ? *p.kv_scale : 1.f) / state.sum : 0.f;
    for (float& value : state.out) value *= factor;
    if (p.max_logits && piece.partial < 0) p.max_logits[place.lse] = state.max;
    store_row(p, piece, row, state.out, state.sum != 0.f ? state.max + logf(state.sum) : -INFINITY);
  }
}

}  // namespace attnops::mla_decode::cpu
