#pragma once
#include <cmath>

#include "device/sm90/barrier.cuh"
#include "mla_decode/sm90/results.cuh"

// From a transposed accumulator, O^T = V^T P, to the output or to a partial result as results.cuh lays it out, in as
// few instructions as it takes. In `o`, element 4 j + 2 h + e of block b is column 64 b + 16 warp + 2 (lane / 4) + h of
// the group's 256, and row 8 j + 2 (lane % 4) + e.
namespace attnops::mla_decode::sm90 {

template <int kRows>
using TransposedOutput = float[4][kRows / 2];

// By row: what values are multiplied by (0: the row saw no key), and where the row goes, or for a partial result the
// natural logs of the row's sum and of what a stored value weighs.
struct TransposedEnds {
  float factor[kPlanRows], weight[kPlanRows];
  union {
    int64_t offset[kPlanRows];
    float lse[kPlanRows];
  };
};

// By one thread per row. `reference` is the base-2 logarithm that probabilities were relative to, `value_scale` what is
// left to multiply values by. No value exceeds `bound` by much when it is divided by the sum.
template <Options kOptions>
__device__ inline void end_row(const Params& p, const Piece& piece, int row, float sum, float reference,
                               float value_scale, float bound, TransposedEnds& ends) {
  const float lse = sum == 0.f ? -INFINITY : (reference + __log2f(sum)) * kLn2;  // a NaN sum goes on: it must show
  const float inverse = sum == 0.f ? 0.f : __fdividef(1.f, sum);
  if (piece.partial >= 0) {
    const PartialScale scale(bound);
    ends.factor[row] = copysignf(scale.factor, value_scale) * inverse;
    ends.weight[row] = lse + __logf(fabsf(value_scale)) - scale.log;
    ends.lse[row] = lse;
    return;
  }
  const bool valid = row < piece.num_rows;
  const RowPlace at = row_place(p, piece.first_row + (valid ? row : 0));
  float factor = value_scale * inverse;
  if constexpr (kOptions != Options::kCommon) factor *= sink_factor(p, at.head, lse);
  ends.factor[row] = factor;
  ends.offset[row] = piece.request * p.out_stride_request + at.token * p.out_stride_token + at.head * p.out_stride_head;
  if (p.lse && valid) {
    p.lse[(static_cast<int64_t>(piece.request) * p.seqlen_q + at.token) * p.num_q_heads + at.head] = lse;
  }
}

template <int kCount>
__device__ inline void store_transposed_partial(const Params& p, const Piece& piece, const TransposedEnds& ends,
                                                int group, const float (&o)[4][kCount]) {
  const int thread = threadIdx.x % kGroupThreads, lane = threadIdx.x % 32, warp = thread / 32;
  auto* out = reinterpret_cast<uint4*>(p.out_partial + static_cast<int64_t>(piece.partial) * kPlanRows * kHeadDimV);
  const float2* factors = reinterpret_cast<const float2*>(ends.factor) + lane % 4;
  // Of a vector of 16 bytes, which is four pairs of columns, the thread has two: of rows eight apart.
  auto* halves = reinterpret_cast<uint2*>(out + (group * kPartialVecs + warp) * kGroupThreads) +
                 2 * (4 * (lane % 4) + lane / 4 % 4) + lane / 16;
#pragma unroll
  for (int i = 0; i < kCount / 8; ++i) {  // 16 rows
    const float2 upper = factors[8 * i], lower = factors[8 * i + 4];
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      const float first = e == 0 ? upper.x : upper.y, second = e == 0 ? lower.x : lower.y;
#pragma unroll
      for (int b = 0; b < 4; ++b) {
        const float* x = o[b] + 8 * i + e;
        halves[2 * (4 * b * kGroupThreads + 32 * i + 16 * e)] = {
            attnops::sm90::pack_pair<__half>(x[0] * first, x[2] * first),
            attnops::sm90::pack_pair<__half>(x[4] * second, x[6] * second)};
      }
    }
  }
  const int row = 16 * warp + row_at_lane(lane);
  if (2 * kCount < kPlanRows && row >= 2 * kCount) return;
  reinterpret_cast<float4*>(out + kPartialWeights)[group * kGroupThreads + thread] = {
      ends.lse[row], ends.lse[row + 8], ends.weight[row], ends.weight[row + 8]};
}

template <typename T, Options kOptions, int kCount>
__device__ inline void store_transposed_rows(const Params& p, const Piece& piece, const TransposedEnds& ends, int group,
                                             bool aligned, const float (&o)[4][kCount]) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x % kGroupThreads / 32;
  T* const out = static_cast<T*>(p.out) + group * 256 + warp * 16 + lane / 4 * 2;
#pragma unroll
  for (int j = 0; j < kCount / 4; ++j) {
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      const int row = 8 * j + 2 * (lane % 4) + e;
      if (row >= piece.num_rows) continue;
      const float factor = ends.factor[row];
      T* const to = out + ends.offset[row];
#pragma unroll
      for (int b = 0; b < 4; ++b) {
        const uint32_t pair = attnops::sm90::pack_pair<T>(o[b][4 * j + e] * factor, o[b][4 * j + 2 + e] * factor);
        if (kOptions == Options::kCommon || aligned) {
          *reinterpret_cast<uint32_t*>(to + 64 * b) = pair;
        } else {
          to[64 * b] = reinterpret_cast<const T*>(&pair)[0];
          to[64 * b + 1] = reinterpret_cast<const T*>(&pair)[1];
        }
      }
    }
  }
}

// When rows' ends are in shared memory, for all threads to see.
template <typename T, Options kOptions, int kCount>
__device__ inline void store_transposed(const Params& p, const Piece& piece, const TransposedEnds& ends, int group,
                                        bool aligned, float (&o)[4][kCount]) {
  const int lane = threadIdx.x % 32;
  const float2 factor = reinterpret_cast<const float2*>(ends.factor)[lane % kCount];
  if (__any_sync(0xffffffffu, factor.x == 0.f || factor.y == 0.f)) {
#pragma unroll
    for (int j = 0; j < kCount / 4; ++j) {
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        if (ends.factor[8 * j + 2 * (lane % 4) + e] != 0.f) continue;
#pragma unroll
        for (int b = 0; b < 4; ++b) o[b][4 * j + e] = o[b][4 * j + 2 + e] = 0.f;  // it may be 0 x NaN
      }
    }
  }
  if (piece.partial >= 0) {
    store_transposed_partial(p, piece, ends, group, o);
  } else {
    store_transposed_rows<T, kOptions>(p, piece, ends, group, aligned, o);
  }
}

}  // namespace attnops::mla_decode::sm90
