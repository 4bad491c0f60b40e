#include "mla_decode/cpu/kernel.h"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstring>
#include <memory>

#include "core/math.h"
#include "cpu/convert.h"
#include "cpu/isa.h"
#include "cpu/tile_ops.h"
#include "mla_decode/cpu/reference.h"

namespace attnops::mla_decode::cpu {
namespace {

using attnops::cpu::BFloat16;
using attnops::cpu::from_float;
using attnops::cpu::kPanel;
using attnops::cpu::kRowMultiple;
using attnops::cpu::kSumLanes;
using attnops::cpu::RowsAhead;
using attnops::cpu::SoftmaxTile;
using attnops::cpu::TileOps;
using attnops::cpu::TileScope;
using attnops::cpu::to_float;

// Tiles of the plan per step of the online softmax: more keys per step spread the loads and stores of the 512-wide
// accumulator over more products, fewer keep the packed keys and values in the second-level cache.
constexpr int kStepTiles = 2;
constexpr int kStepKeys = kStepTiles * kPlanTileTokens;
constexpr int kScalesPerRow = 4;  // of a 656-byte row
constexpr int kValuesPerScale = kHeadDimV / kScalesPerRow;

// Keys that are multiplied where they lie in the pool when their rows follow one another, and else are copied first.
constexpr int kChunkKeys = kRowMultiple;
constexpr int kStepChunks = kStepKeys / kChunkKeys;

static_assert(kPlanRows % kRowMultiple == 0 && kPlanTileTokens % kChunkKeys == 0);

// The keys of a step, as its rows see them.
struct StepKeys {
  Key key[kStepKeys];
  uint64_t visible[kPlanRows * kStepTiles];
  int num_keys;
  bool any_visible, all_visible;
};

// Everything that a thread needs for a piece. `float` is the largest element, the arrays fit every compute type.
struct alignas(64) Scratch {
  float q[kPlanRows * kHeadDimQk];
  float q_panels[kPlanRows * kHeadDimQk];
  float rows[kStepKeys * kHeadDimQk];       // keys that are copied or converted
  float scales[kStepKeys * kScalesPerRow];  // of their sums, where scales_sums() holds
  float values[kStepKeys * kHeadDimV];
  float scores[kPlanRows * kStepKeys];
  float scores_by_key[kStepKeys * kPlanRows];
  float probs[kPlanRows * kStepKeys];
  float out[kPlanRows * kHeadDimV];
  float row_max[kPlanRows];
  float row_sum[kPlanRows * kSumLanes];
  float max_logit[kPlanRows];
  StepKeys steps[2];  // the one that is computed, and the next
};

// One per thread, for ever: nothing in it outlives a piece.
Scratch& scratch_of_thread() {
  thread_local std::unique_ptr<Scratch> scratch;
  if (!scratch) scratch.reset(new Scratch);
  return *scratch;
}

// A step: its keys as matrices of the compute type, in the pool or in Scratch::rows.
struct Step {
  struct Chunk {
    const std::byte* rows;
    int64_t row_stride;  // elements
  };
  Chunk chunks[kStepChunks];
  const StepKeys& keys;

  explicit Step(const StepKeys& of) : keys(of) {}
};

constexpr DType compute_dtype(const TileOps& ops) { return ops.element_size == 2 ? DType::kBFloat16 : DType::kFloat32; }

// Whether the scales of a row are multiplied to sums: bf16 holds every e4m3, but not every e4m3 times a scale.
bool scales_sums(const Params& p, const TileOps& ops) {
  return p.kv_dtype == DType::kUInt8 && !p.shared_rows && compute_dtype(ops) == DType::kBFloat16;
}

// `count` elements of a row under one scale, to column `column` of `dst`.
void dequantize_part(const TileOps& ops, const uint8_t* source, int count, DType dtype, float scale, void* dst,
                     int column) {
  const void* row = source;
  ops.load_rows(static_cast<std::byte*>(dst) + column * ops.element_size, count, &row, 1, count, count, dtype, scale);
}

void round_to_bf16(float* values, int count) {
  for (int d = 0; d < count; ++d) values[d] = to_float(from_float<BFloat16>(values[d]));
}

// A row of bytes into elements of the compute type.
void dequantize_row(const Params& p, const TileOps& ops, const Key& key, void* dst) {
  if (p.shared_rows) {
    for (int d = 0; d < kSharedNope; d += kSharedScaleWidth) {
      dequantize_part(ops, key.row + d, kSharedScaleWidth, DType::kFloat8E4M3,
                      power_of_two(key.scales[d / kSharedScaleWidth]), dst, d);
    }
    return dequantize_part(ops, key.row + kSharedNope, kHeadDimRope, DType::kBFloat16, 1.f, dst, kSharedNope);
  }
  float scales[kScalesPerRow];
  std::memcpy(scales, key.row + kHeadDimV, sizeof(scales));
  for (int i = 0; i < kScalesPerRow; ++i) {
    dequantize_part(ops, key.row + i * kValuesPerScale, kValuesPerScale, DType::kFloat8E4M3, scales[i], dst,
                    i * kValuesPerScale);
  }
  dequantize_part(ops, key.row + kHeadDimV + sizeof(scales), kHeadDimRope, DType::kBFloat16, 1.f, dst, kHeadDimV);
  if (key.rounded && compute_dtype(ops) == DType::kFloat32) round_to_bf16(static_cast<float*>(dst), kHeadDimV);
}

// kChunkKeys rows of bytes into elements of the compute type that no scale has touched yet. These go to `scales`.
void load_unscaled(const TileOps& ops, const Key* keys, std::byte* copies, float* scales) {
  const void* latent[kChunkKeys] = {};
  const void* rope[kChunkKeys] = {};
  for (int k = 0; k < kChunkKeys; ++k) {
    const uint8_t* row = keys[k].row;
    if (row == nullptr) continue;
    latent[k] = row;
    rope[k] = row + kFp8RowBytes - kHeadDimRope * sizeof(BFloat16);
    std::memcpy(scales + k * kScalesPerRow, row + kHeadDimV, kScalesPerRow * sizeof(float));
  }
  ops.load_rows(copies, kHeadDimQk, latent, kChunkKeys, kHeadDimV, kHeadDimV, DType::kFloat8E4M3, 1.f);
  ops.load_rows(copies + kHeadDimV * ops.element_size, kHeadDimQk, rope, kChunkKeys, kHeadDimRope, kHeadDimRope,
                DType::kBFloat16, 1.f);
}

// The rows of kChunkKeys keys as a matrix, in the pool when all of them are seen and follow one another there, else in
// `copies`, with zeros for unseen keys.
Step::Chunk chunk_of(const Params& p, const TileOps& ops, const Key* keys, std::byte* copies, float* sum_scales) {
  const DType dtype = compute_dtype(ops);
  const int64_t stride = p.selects ? kHeadDimQk : p.kv_stride_token, row_bytes = stride * ops.element_size;
  bool as_it_lies = p.kv_dtype == dtype && !p.selects && keys[0].row != nullptr;
  for (int k = 1; k < kChunkKeys && as_it_lies; ++k) as_it_lies = keys[k].row == keys[0].row + k * row_bytes;
  if (as_it_lies) return {reinterpret_cast<const std::byte*>(keys[0].row), stride};

  if (p.kv_dtype != DType::kUInt8) {
    const void* rows[kChunkKeys];
    for (int k = 0; k < kChunkKeys; ++k) rows[k] = keys[k].row;
    ops.load_rows(copies, kHeadDimQk, rows, kChunkKeys, head_dim_qk(p), head_dim_qk(p), p.kv_dtype, 1.f);
    return {copies, kHeadDimQk};
  }
  const int64_t copy_bytes = int64_t{kHeadDimQk} * ops.element_size;
  std::fill_n(sum_scales, kChunkKeys * kScalesPerRow, 1.f);
  if (scales_sums(p, ops) && std::none_of(keys, keys + kChunkKeys, [](const Key& key) { return key.rounded; })) {
    load_unscaled(ops, keys, copies, sum_scales);
    return {copies, kHeadDimQk};
  }
  for (int k = 0; k < kChunkKeys; ++k) {
    if (keys[k].row) {
      dequantize_row(p, ops, keys[k], copies + k * copy_bytes);
    } else {
      std::memset(copies + k * copy_bytes, 0, copy_bytes);
    }
  }
  return {copies, kHeadDimQk};
}

void find_keys(const Params& p, const Piece& piece, int first_tile, int num_tiles, StepKeys& step) {
  step.num_keys = num_tiles * kPlanTileTokens;
  step.any_visible = false;
  step.all_visible = true;
  for (int t = 0; t < num_tiles; ++t) {
    const KeyTile tile = key_tile(p, piece, first_tile + t);
    step.any_visible |= tile.any_visible;
    step.all_visible &= tile.all_visible;
    std::copy_n(tile.key, kPlanTileTokens, step.key + t * kPlanTileTokens);
    for (int i = 0; i < piece.num_rows; ++i) step.visible[i * kStepTiles + t] = tile.visible[i];
  }
}

Step step_of(const Params& p, const TileOps& ops, const StepKeys& keys, Scratch& s) {
  Step step(keys);
  for (int key = 0; key < keys.num_keys; key += kChunkKeys) {
    auto* copies = reinterpret_cast<std::byte*>(s.rows) + static_cast<int64_t>(key) * kHeadDimQk * ops.element_size;
    step.chunks[key / kChunkKeys] = chunk_of(p, ops, keys.key + key, copies, s.scales + key * kScalesPerRow);
  }
  return step;
}

// Bytes of a key in the pool.
int key_bytes(const Params& p) {
  if (p.kv_dtype != DType::kUInt8) return head_dim_qk(p) * size_of(p.kv_dtype);
  return p.shared_rows ? kSharedDataBytes : kFp8RowBytes;
}

void load_queries(const Params& p, const Piece& piece, const TileOps& ops, float sign, Scratch& s) {
  const void* latent[kPlanRows] = {};
  const void* rope[kPlanRows] = {};
  for (int i = 0; i < piece.num_rows; ++i) {
    const RowPlace place = row_place(p, piece, i);
    latent[i] = place.q;
    rope[i] = place.q_pe;
  }
  const int rows = round_up(piece.num_rows, kRowMultiple);
  auto* rope_columns = reinterpret_cast<std::byte*>(s.q) + kHeadDimV * ops.element_size;
  ops.load_rows(s.q, kHeadDimQk, latent, rows, kHeadDimV, kHeadDimV, p.dtype, sign);
  if (!p.shared_rows) ops.load_rows(rope_columns, kHeadDimQk, rope, rows, kHeadDimRope, kHeadDimRope, p.dtype, sign);

  const void* loaded[kPlanRows];
  for (int i = 0; i < rows; ++i) {
    loaded[i] = reinterpret_cast<const std::byte*>(s.q) + static_cast<int64_t>(i) * kHeadDimQk * ops.element_size;
  }
  ops.pack_keys(s.q_panels, loaded, rows, head_dim_qk(p), kHeadDimQk, compute_dtype(ops));
}

// Number of chunks from `first` on that are one matrix.
int run_length(const TileOps& ops, const Step& step, int first) {
  const Step::Chunk& start = step.chunks[first];
  const int64_t chunk_bytes = kChunkKeys * start.row_stride * ops.element_size;
  int length = 1;
  while ((first + length) * kChunkKeys < step.keys.num_keys &&
         step.chunks[first + length].row_stride == start.row_stride &&
         step.chunks[first + length].rows == start.rows + length * chunk_bytes) {
    ++length;
  }
  return length;
}

// sums += scale * part. Both have `columns`, a multiple of kPanel.
void add_scaled(float* sums, const float* part, float scale, int columns) {
  for (int j = 0; j < columns; j += kPanel) {
    for (int i = 0; i < kPanel; ++i) sums[j + i] += scale * part[j + i];
  }
}

// K Q^T of keys in Scratch::rows. Columns under one scale are a sum of their own, in Scratch::scores.
void score_parts(const TileOps& ops, int num_keys, int columns, RowsAhead& ahead, Scratch& s) {
  const auto multiply = [&](float* sums, int column, int k) {
    const auto* keys = reinterpret_cast<const std::byte*>(s.rows) + column * ops.element_size;
    const auto* queries = reinterpret_cast<const std::byte*>(s.q_panels) + column * kPanel * ops.element_size;
    ops.gemm_ahead(sums, columns, keys, kHeadDimQk, queries, kHeadDimQk, num_keys, columns, k, ahead);
  };
  multiply(s.scores_by_key, kHeadDimV, kHeadDimRope);
  for (int i = 0; i < kScalesPerRow; ++i) {
    multiply(s.scores, i * kValuesPerScale, kValuesPerScale);
    for (int key = 0; key < num_keys; ++key) {
      const int64_t at = static_cast<int64_t>(key) * columns;
      add_scaled(s.scores_by_key + at, s.scores + at, s.scales[key * kScalesPerRow + i], columns);
    }
  }
}

// The values in Scratch::rows times their scales, rounded.
void scale_values(const TileOps& ops, int num_keys, Scratch& s) {
  for (int key = 0; key < num_keys; ++key) {
    auto* row = reinterpret_cast<uint8_t*>(s.rows) + static_cast<int64_t>(key) * kHeadDimQk * ops.element_size;
    for (int i = 0; i < kScalesPerRow; ++i) {
      const int column = i * kValuesPerScale;
      dequantize_part(ops, row + column * ops.element_size, kValuesPerScale, compute_dtype(ops),
                      s.scales[key * kScalesPerRow + i], row, column);
    }
  }
}

// scores = Q K^T, as (K Q^T)^T: packing the queries once is cheaper than packing keys that are used once, and the pool
// itself can be an operand.
void score(const Params& p, const Piece& piece, const TileOps& ops, const Step& step, RowsAhead& ahead, Scratch& s) {
  const int columns = round_up(piece.num_rows, kPanel);
  if (scales_sums(p, ops)) {
    score_parts(ops, step.keys.num_keys, columns, ahead, s);
  } else {
    for (int i = 0; i * kChunkKeys < step.keys.num_keys;) {
      const int length = run_length(ops, step, i);
      ops.gemm_ahead(s.scores_by_key + i * kChunkKeys * columns, columns, step.chunks[i].rows,
                     step.chunks[i].row_stride, s.q_panels, kHeadDimQk, length * kChunkKeys, columns, head_dim_qk(p),
                     ahead);
      i += length;
    }
  }
  ops.transpose(s.scores, kStepKeys, s.scores_by_key, columns, step.keys.num_keys, columns);
}

// out += P V. Few query rows use every value once or twice: values are then multiplied where they lie.
void multiply_values(const Piece& piece, const TileOps& ops, const Step& step, RowsAhead& ahead, Scratch& s) {
  const int m = piece.num_rows, n = step.keys.num_keys;
  const void* rows[kStepKeys];
  for (int k = 0; k < n; ++k) {
    const Step::Chunk& chunk = step.chunks[k / kChunkKeys];
    rows[k] = chunk.rows + (k % kChunkKeys) * chunk.row_stride * ops.element_size;
  }
  if (ops.gemm_rows) return ops.gemm_rows(s.out, kHeadDimV, s.probs, kStepKeys, rows, m, kHeadDimV, n, ahead);
  ops.pack_values(s.values, rows, n, kHeadDimV, kHeadDimV, compute_dtype(ops));
  ops.gemm(s.out, kHeadDimV, s.probs, kStepKeys, s.values, n, m, kHeadDimV, n, true);
}

// The largest logits so far: the softmax's reference is only near them.
void take_maxima(const Piece& piece, const Step& step, float scale, Scratch& s) {
  for (int i = 0; i < piece.num_rows; ++i) {
    for (int k = 0; k < step.keys.num_keys; ++k) {
      if (!(step.keys.visible[i * kStepTiles + k / kPlanTileTokens] >> k % kPlanTileTokens & 1)) continue;
      s.max_logit[i] = fmaxf(s.max_logit[i], s.scores[i * kStepKeys + k] * scale);
    }
  }
}

void attend(const Params& p, const Piece& piece, const TileOps& ops, const Step& step, float scale, RowsAhead& ahead,
            Scratch& s) {
  const int m = piece.num_rows, n = step.keys.num_keys;
  score(p, piece, ops, step, ahead, s);
  if (p.max_logits) take_maxima(piece, step, scale, s);
  ops.softmax({.scores = s.scores,
               .ld_scores = kStepKeys,
               .probs = s.probs,
               .ld_probs = kStepKeys,
               .m = m,
               .n = n,
               .visible = step.keys.all_visible ? nullptr : step.keys.visible,
               .ld_visible = kStepTiles,
               .scale = scale,
               .logit_cap = p.logit_cap,
               .row_max = s.row_max,
               .row_sum = s.row_sum,
               .out = s.out,
               .ld_out = kHeadDimV,
               .n_out = kHeadDimV});
  if (scales_sums(p, ops)) scale_values(ops, n, s);
  multiply_values(piece, ops, step, ahead, s);
}

// Divides by the sums and writes the rows, each to the output or to the piece's partial result.
void finish(const Params& p, const Piece& piece, const TileOps& ops, float kv_scale, Scratch& s) {
  float factors[kPlanRows];
  void* rows[kPlanRows];
  for (int i = 0; i < piece.num_rows; ++i) {
    float sum = 0.f;
    for (int lane = 0; lane < kSumLanes; ++lane) sum += s.row_sum[i * kSumLanes + lane];
    const float lse = sum != 0.f ? (s.row_max[i] + log2f(sum)) * kLn2 : -INFINITY;
    factors[i] = sum != 0.f ? kv_scale / sum : 0.f;
    if (piece.partial >= 0) {
      const int64_t row = piece.partial * kPlanRows + i;
      rows[i] = p.out_partial + row * kHeadDimV;
      p.lse_partial[row] = lse;
    } else {
      const RowPlace place = row_place(p, piece, i);
      rows[i] = place.out;
      factors[i] *= sink_factor(p, place.head, lse);
      if (p.lse) p.lse[place.lse] = lse;
      if (p.max_logits) p.max_logits[place.lse] = s.max_logit[i];
    }
  }
  const DType dtype = piece.partial >= 0 ? DType::kFloat32 : p.dtype;
  ops.store_rows(rows, s.out, kHeadDimV, factors, piece.num_rows, kHeadDimV, dtype);
}

}  // namespace

void run_tiled(const Params& p, const Piece& piece, const TileOps* table) {
  const TileOps& ops = *table;
  const TileScope scope(ops);
  Scratch& s = scratch_of_thread();
  const float kv_scale = p.kv_scale ? *p.kv_scale : 1.f;
  const float scale = p.softmax_scale * kv_scale;
  load_queries(p, piece, ops, std::signbit(scale) ? -1.f : 1.f, s);  // softmax takes scales from zero up
  const int rows = round_up(piece.num_rows, kRowMultiple);
  std::fill_n(s.row_max, rows, -INFINITY);
  std::fill_n(s.max_logit, rows, -INFINITY);
  std::fill_n(s.row_sum, rows * kSumLanes, 0.f);
  std::fill_n(s.out, rows * kHeadDimV, 0.f);
  const int end_tile = piece.first_tile + piece.num_tiles;
  const auto find = [&](int tile, StepKeys& keys) {
    find_keys(p, piece, tile, min_of(kStepTiles, end_tile - tile), keys);
  };
  if (piece.num_tiles > 0) find(piece.first_tile, s.steps[0]);
  for (int t = piece.first_tile, which = 0; t < end_tile; t += kStepTiles, which ^= 1) {
    // The next step's keys are asked for while this one is computed.
    StepKeys& next = s.steps[which ^ 1];
    next.num_keys = 0;
    if (t + kStepTiles < end_tile) find(t + kStepTiles, next);
    const void* rows[kStepKeys];
    int count = 0;
    for (int k = 0; k < next.num_keys; ++k) {
      if (next.key[k].row) rows[count++] = next.key[k].row;
    }
    RowsAhead ahead(rows, count, key_bytes(p));
    const StepKeys& keys = s.steps[which];
    if (keys.any_visible) attend(p, piece, ops, step_of(p, ops, keys, s), std::fabs(scale), ahead, s);
  }
  finish(p, piece, ops, kv_scale, s);
}

Kernel select_kernel(const Params& p) {
  const bool plain = p.kv_dtype == DType::kFloat8E5M2;  // no tile loads e5m2
  const TileOps* ops = plain ? nullptr : attnops::cpu::tile_ops(attnops::cpu::current_isa(), p.dtype);
  return ops ? Kernel{&run_tiled, ops} : Kernel{&run_reference, nullptr};
}

}  // namespace attnops::mla_decode::cpu
