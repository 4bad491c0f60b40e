#include "mla_decode/cpu/kernel.h"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstring>
#include <memory>

#include "core/math.h"
#include "cpu/isa.h"
#include "cpu/tile_ops.h"
#include "mla_decode/cpu/reference.h"

namespace attnops::mla_decode::cpu {
namespace {

using attnops::cpu::kPanel;
using attnops::cpu::kRowMultiple;
using attnops::cpu::kSumLanes;
using attnops::cpu::SoftmaxTile;
using attnops::cpu::TileOps;
using attnops::cpu::TileScope;

// Tiles of the plan per step of the online softmax: more keys per step spread the loads and stores of the 512-wide
// accumulator over more products, fewer keep the packed keys and values in the second-level cache.
constexpr int kStepTiles = 2;
constexpr int kStepKeys = kStepTiles * kPlanTileTokens;
constexpr int kScalesPerRow = 4;  // of a 656-byte row
constexpr int kValuesPerScale = kHeadDimV / kScalesPerRow;

// Keys that one product takes straight from the pool, when their rows follow one another there.
constexpr int kRunKeys = kRowMultiple;
constexpr int kStepRuns = kStepKeys / kRunKeys;

static_assert(kPlanRows % kRowMultiple == 0 && kPlanTileTokens % kRunKeys == 0);

// Everything that a thread needs for a piece. `float` is the largest element, the arrays fit every compute type.
struct alignas(64) Scratch {
  float q[kPlanRows * kHeadDimQk];
  float q_panels[kPlanRows * kHeadDimQk];
  float keys[kStepKeys * kHeadDimQk];
  float values[kStepKeys * kHeadDimV];
  float rows[kStepKeys * kHeadDimQk];  // dequantized 656-byte rows
  float scores[kPlanRows * kStepKeys];
  float scores_by_key[kStepKeys * kPlanRows];
  float probs[kPlanRows * kStepKeys];
  float out[kPlanRows * kHeadDimV];
  float row_max[kPlanRows];
  float row_sum[kPlanRows * kSumLanes];
  uint64_t visible[kPlanRows * kStepTiles];
};

// One per thread, for ever: nothing in it outlives a piece.
Scratch& scratch_of_thread() {
  thread_local std::unique_ptr<Scratch> scratch;
  if (!scratch) scratch.reset(new Scratch);
  return *scratch;
}

// The keys of a step, as pack_keys and pack_values take them.
struct Step {
  const void* rows[kStepKeys];
  DType dtype;
  int num_keys;
  int64_t row_stride;  // elements between the rows of a run
  bool any_visible, all_visible;
};

constexpr DType compute_dtype(const TileOps& ops) { return ops.element_size == 2 ? DType::kBFloat16 : DType::kFloat32; }

// One 656-byte row into 576 elements of the compute type.
void dequantize_row(const TileOps& ops, const uint8_t* row, void* dst) {
  const auto* scales = reinterpret_cast<const std::byte*>(row) + kHeadDimV;
  for (int i = 0; i < kScalesPerRow; ++i) {
    float scale;
    std::memcpy(&scale, scales + i * sizeof(float), sizeof(float));
    const void* source = row + i * kValuesPerScale;
    auto* part = static_cast<std::byte*>(dst) + i * kValuesPerScale * ops.element_size;
    ops.load_rows(part, kValuesPerScale, &source, 1, kValuesPerScale, kValuesPerScale, DType::kFloat8E4M3, scale);
  }
  const void* rope = scales + kScalesPerRow * sizeof(float);
  auto* part = static_cast<std::byte*>(dst) + kHeadDimV * ops.element_size;
  ops.load_rows(part, kHeadDimRope, &rope, 1, kHeadDimRope, kHeadDimRope, DType::kBFloat16, 1.f);
}

Step step_of(const Params& p, const Piece& piece, const TileOps& ops, int first_tile, int num_tiles, Scratch& s) {
  Step step;
  step.dtype = p.kv_dtype;
  step.num_keys = num_tiles * kPlanTileTokens;
  step.row_stride = p.kv_stride_token;
  step.any_visible = false;
  step.all_visible = true;
  for (int t = 0; t < num_tiles; ++t) {
    const KeyTile tile = key_tile(p, piece, first_tile + t);
    step.any_visible |= tile.any_visible;
    step.all_visible &= tile.all_visible;
    for (int k = 0; k < kPlanTileTokens; ++k) step.rows[t * kPlanTileTokens + k] = tile.key[k];
    for (int i = 0; i < piece.num_rows; ++i) s.visible[i * kStepTiles + t] = tile.visible[i];
  }
  if (p.kv_dtype != DType::kUInt8) return step;
  step.dtype = compute_dtype(ops);
  step.row_stride = kHeadDimQk;
  for (int k = 0; k < step.num_keys; ++k) {
    if (step.rows[k] == nullptr) continue;
    auto* row = reinterpret_cast<std::byte*>(s.rows) + static_cast<int64_t>(k) * kHeadDimQk * ops.element_size;
    dequantize_row(ops, static_cast<const uint8_t*>(step.rows[k]), row);
    step.rows[k] = row;
  }
  return step;
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
  ops.load_rows(rope_columns, kHeadDimQk, rope, rows, kHeadDimRope, kHeadDimRope, p.dtype, sign);

  const void* loaded[kPlanRows];
  for (int i = 0; i < rows; ++i) {
    loaded[i] = reinterpret_cast<const std::byte*>(s.q) + static_cast<int64_t>(i) * kHeadDimQk * ops.element_size;
  }
  ops.pack_keys(s.q_panels, loaded, rows, kHeadDimQk, kHeadDimQk, compute_dtype(ops));
}

// Number of keys from `first` on whose rows follow one another at row_stride, in the compute type; a multiple of
// kRunKeys.
int run_length(const TileOps& ops, const Step& step, int first) {
  if (step.dtype != compute_dtype(ops) || step.rows[first] == nullptr) return 0;
  const auto* row = static_cast<const std::byte*>(step.rows[first]);
  int length = 1;
  while (first + length < step.num_keys &&
         step.rows[first + length] == row + length * step.row_stride * ops.element_size) {
    ++length;
  }
  return length / kRunKeys * kRunKeys;
}

// scores = Q K^T. Rows that lie in the pool as a matrix are one operand as they are: K Q^T with packed queries, then
// a transposition, is cheaper than packing keys that are used once. Every score adds its products in the same order
// either way, so the result does not depend on how a request's pages lie.
void score(const Piece& piece, const TileOps& ops, const Step& step, Scratch& s) {
  int runs[kStepRuns];
  int covered = 0;
  for (int i = 0; covered < step.num_keys; covered += runs[i++]) {
    runs[i] = run_length(ops, step, covered);
    if (runs[i] == 0) break;
  }
  if (covered < step.num_keys) {
    ops.pack_keys(s.keys, step.rows, step.num_keys, kHeadDimQk, kHeadDimQk, step.dtype);
    ops.gemm(s.scores, kStepKeys, s.q, kHeadDimQk, s.keys, kHeadDimQk, piece.num_rows, step.num_keys, kHeadDimQk,
             false);
    return;
  }
  const int columns = round_up(piece.num_rows, kPanel);
  for (int i = 0, key = 0; key < step.num_keys; key += runs[i++]) {
    ops.gemm(s.scores_by_key + key * columns, columns, step.rows[key], step.row_stride, s.q_panels, kHeadDimQk, runs[i],
             columns, kHeadDimQk, false);
  }
  ops.transpose(s.scores, kStepKeys, s.scores_by_key, columns, step.num_keys, columns);
}

void attend(const Piece& piece, const TileOps& ops, const Step& step, float scale, float logit_cap, Scratch& s) {
  const int m = piece.num_rows, n = step.num_keys;
  score(piece, ops, step, s);
  ops.softmax({.scores = s.scores,
               .ld_scores = kStepKeys,
               .probs = s.probs,
               .ld_probs = kStepKeys,
               .m = m,
               .n = n,
               .visible = step.all_visible ? nullptr : s.visible,
               .ld_visible = kStepTiles,
               .scale = scale,
               .logit_cap = logit_cap,
               .row_max = s.row_max,
               .row_sum = s.row_sum,
               .out = s.out,
               .ld_out = kHeadDimV,
               .n_out = kHeadDimV});
  ops.pack_values(s.values, step.rows, n, kHeadDimV, kHeadDimV, step.dtype);
  ops.gemm(s.out, kHeadDimV, s.probs, kStepKeys, s.values, n, m, kHeadDimV, n, true);
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
  std::fill_n(s.row_sum, rows * kSumLanes, 0.f);
  std::fill_n(s.out, rows * kHeadDimV, 0.f);
  const int end_tile = piece.first_tile + piece.num_tiles;
  for (int t = piece.first_tile; t < end_tile; t += kStepTiles) {
    const Step step = step_of(p, piece, ops, t, min_of(kStepTiles, end_tile - t), s);
    if (step.any_visible) attend(piece, ops, step, std::fabs(scale), p.logit_cap, s);
  }
  finish(p, piece, ops, kv_scale, s);
}

Kernel select_kernel(const Params& p) {
  const TileOps* ops = attnops::cpu::tile_ops(attnops::cpu::current_isa(), p.dtype);
  return ops ? Kernel{&run_tiled, ops} : Kernel{&run_reference, nullptr};
}

}  // namespace attnops::mla_decode::cpu
