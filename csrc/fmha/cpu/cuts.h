#pragma once
#include <algorithm>
#include <cmath>
#include <cstdint>

#include "cpu/tile_ops.h"
#include "fmha/cpu/work.h"

// Every row's keys are cut at the same places, whoever computes which of them: results of a cut are made from nothing,
// and added to those of the cuts before, in their order. So threads can share the keys of a few rows, and bits do not
// depend on it.
namespace attnops::fmha::cpu {

inline constexpr int kCutKeys = 2048;

// Rows over some of their keys, not yet divided by their sums.
struct PartialRows {
  float* acc;      // [rows, dim_v]
  float* row_max;  // [rows], in log2 units
  float* row_sum;  // [rows, kSumLanes]

  static int64_t floats(int rows, int dim_v) { return int64_t{rows} * (dim_v + 1 + attnops::cpu::kSumLanes); }
  static PartialRows in(float* memory, int rows, int dim_v) {
    float* const row_max = memory + int64_t{rows} * dim_v;
    return {memory, row_max, row_max + rows};
  }
};

// Adds rows [begin, end) of `from` to those of `into`. A row without keys on one side is the other side's, bit for bit.
inline void add_rows(const PartialRows& into, const PartialRows& from, int begin, int end, int dim_v) {
  constexpr int kLanes = attnops::cpu::kSumLanes;
  const auto has_keys = [](const PartialRows& p, int row) {
    if (p.row_max[row] != -INFINITY) return true;
    for (int i = 0; i < kLanes; ++i) {
      if (p.row_sum[row * kLanes + i] != 0.f) return true;  // NaN
    }
    return false;
  };
  const auto add = [](float* to, const float* more, int count, float keep, float take) {
    for (int i = 0; i < count; ++i) to[i] = to[i] * keep + more[i] * take;
  };
  for (int row = begin; row < end; ++row) {
    if (!has_keys(from, row)) continue;
    float *const acc = into.acc + int64_t{row} * dim_v, *const sums = into.row_sum + row * kLanes;
    const float *const more = from.acc + int64_t{row} * dim_v, *const more_sums = from.row_sum + row * kLanes;
    const float before = into.row_max[row], other = from.row_max[row];
    if (!has_keys(into, row)) {
      into.row_max[row] = other;
      std::copy_n(more, dim_v, acc);
      std::copy_n(more_sums, kLanes, sums);
      continue;
    }
    const float larger = before > other ? before : other;
    const float keep = std::exp2(before - larger), take = std::exp2(other - larger);
    into.row_max[row] = larger;
    add(acc, more, dim_v, keep, take);
    add(sums, more_sums, kLanes, keep, take);
  }
}

// Keys that some row of a work may see, and the cuts that they lie in: [first, end).
inline KeyRange keys_of_work(const Params& p, const Work& w) {
  const KeyBounds keys = key_bounds(p, w.request, w.token(0), w.token(w.num_rows - 1));
  return {keys.low.begin, keys.high.end};
}
inline KeyRange cuts_of_work(const Params& p, const Work& w) {
  const KeyRange keys = keys_of_work(p, w);
  if (keys.begin >= keys.end) return {0, 1};  // somebody must store the rows
  return {keys.begin / kCutKeys, (keys.end - 1) / kCutKeys + 1};
}

}  // namespace attnops::fmha::cpu
