#pragma once
#include "device/sm90/store_box.cuh"
#include "mla_decode/sm90/epilogue.cuh"

// From an accumulator to the output or to a partial result, in as few instructions as it takes: a CTA runs this once or
// twice, at the speed of instruction fetches.
namespace attnops::mla_decode::sm90 {

// Where a warp stages 16 rows of 32 columns: rows of 64 bytes, their chunks permuted so that neither side has
// conflicts.
inline constexpr int kStageBytes = 16 * 64;
__device__ inline int staged(int row, int chunk) { return row * 64 + ((chunk ^ (row / 2 & 3)) << 4); }

// A partial result lies in memory as the accumulators do: 16 bytes of each of 128 threads, 16 times, of each group.
// Values are 16-bit floats relative to the largest of the thread's row, which is several bits more than the output
// will have; behind them, 16 bytes of each thread: the natural logs of its two rows' sums, and of what a value weighs.
inline constexpr int kPartialVecs = 16;                                   // per thread
inline constexpr int kPartialWeights = 2 * kPartialVecs * kGroupThreads;  // in units of 16 bytes from the block's start

// A power of two that brings `largest` near the upper end of the 16-bit range, and its natural log.
struct PartialScale {
  float factor, log;

  __device__ explicit PartialScale(float largest) {
    constexpr int kBias = 127, kTop = 14, kMost = 93;
    const int exponent = __float_as_int(largest) >> 23 & 255;
    const int power = min_of(kTop - (exponent - kBias), kMost);
    factor = __int_as_float((power + kBias) << 23);
    log = static_cast<float>(power) * kLn2;
  }
};

// Two values of 16 bits.
__device__ inline float2 unpack_partial(uint32_t word) {
  return __half22float2(reinterpret_cast<const __half2&>(word));
}

__device__ inline void store_partial(const Params& p, const Piece& piece, const float (&lse)[kRowsPerThread],
                                     const float (&factor)[kRowsPerThread], int group, const float (&o)[128]) {
  const int thread = threadIdx.x % kGroupThreads;
  auto* out = reinterpret_cast<uint4*>(p.out_partial + static_cast<int64_t>(piece.partial) * kPlanRows * kHeadDimV);
  float scaled[kRowsPerThread], weight[kRowsPerThread];
#pragma unroll
  for (int h = 0; h < kRowsPerThread; ++h) {
    float largest[2] = {};
#pragma unroll
    for (int j = 0; j < 32; ++j) {
#pragma unroll
      for (int e = 0; e < 2; ++e) largest[e] = fmaxf(largest[e], fabsf(o[4 * j + 2 * h + e]));
    }
    const PartialScale scale(fmaxf(largest[0], largest[1]) * factor[h]);
    scaled[h] = factor[h] * scale.factor;
    weight[h] = lse[h] - scale.log;
  }
#pragma unroll
  for (int v = 0; v < kPartialVecs; ++v) {
    uint32_t words[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int at = 8 * v + 2 * i;
      words[i] = attnops::sm90::pack_pair<__half>(o[at] * scaled[i % 2], o[at + 1] * scaled[i % 2]);
    }
    out[(group * kPartialVecs + v) * kGroupThreads + thread] = {words[0], words[1], words[2], words[3]};
  }
  reinterpret_cast<float4*>(out + kPartialWeights)[group * kGroupThreads + thread] = {lse[0], lse[1], weight[0],
                                                                                      weight[1]};
}

// What the accumulators of a thread's rows are multiplied by in the end; those of rows that see nothing are zeros.
struct RowEnds {
  float lse[kRowsPerThread], factor[kRowsPerThread];

  __device__ RowEnds(const RowState& rows, const RowSums& sums, float (&o)[128]) {
    if (__any_sync(0xffffffffu, sums.total[0] == 0.f || sums.total[1] == 0.f)) {
#pragma unroll
      for (int i = 0; i < 128; ++i) {
        if (sums.total[i / 2 % 2] == 0.f) o[i] = 0.f;  // what sees nothing may hold 0 x NaN
      }
    }
#pragma unroll
    for (int h = 0; h < kRowsPerThread; ++h) {
      const float sum = sums.total[h];
      lse[h] = sum == 0.f ? -INFINITY : (rows.maximum[h] + __log2f(sum)) * kLn2;  // a NaN sum goes on: it must show
      factor[h] = sum == 0.f ? 0.f : __fdividef(1.f, sum);
    }
  }
};

__device__ inline void store_lse(const Params& p, const Piece& piece, const RowPlace& at, float lse) {
  if (p.lse) p.lse[(static_cast<int64_t>(piece.request) * p.seqlen_q + at.token) * p.num_q_heads + at.head] = lse;
}

// Writes this group's 256 of the 512 columns of the piece's rows. Both groups are done with `stage`.
template <typename T, Options kOptions>
__device__ inline void store_rows(const Params& p, const Piece& piece, const RowState& rows, const RowSums& sums,
                                  int group, bool aligned, const uint8_t* stage_base, uint32_t stage, float (&o)[128]) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x % kGroupThreads / 32;
  auto [lse, factor] = RowEnds(rows, sums, o);
  if (piece.partial >= 0) return store_partial(p, piece, lse, factor, group, o);

  T* out[kRowsPerThread];
  bool valid[kRowsPerThread];
#pragma unroll
  for (int h = 0; h < kRowsPerThread; ++h) {
    const int row = warp * 16 + lane / 4 + 8 * h;
    valid[h] = row < piece.num_rows;
    const RowPlace at = row_place(p, piece.first_row + (valid[h] ? row : 0));
    if constexpr (kOptions != Options::kCommon) factor[h] *= sink_factor(p, at.head, lse[h]);
    out[h] = static_cast<T*>(p.out) + piece.request * p.out_stride_request + at.token * p.out_stride_token +
             at.head * p.out_stride_head + group * 256 + 8 * (lane % 4);
    if (valid[h] && group == 0 && lane % 4 == 0) store_lse(p, piece, at, lse[h]);
  }
  const int offset = (2 * warp + group) * kStageBytes;
#pragma unroll
  for (int c = 0; c < 8; ++c) {
#pragma unroll
    for (int k = 0; k < 2; ++k) {
      uint32_t words[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int at = 16 * c + 8 * k + 2 * i;
        words[i] = attnops::sm90::pack_pair<T>(o[at] * factor[i % 2], o[at + 1] * factor[i % 2]);
      }
      attnops::sm90::store_fragment(words, stage + offset + staged(lane % 16, 2 * k + lane / 16));
    }
    __syncwarp();
#pragma unroll
    for (int h = 0; h < kRowsPerThread; ++h) {
      const T* from = reinterpret_cast<const T*>(stage_base + offset + staged(lane / 4 + 8 * h, lane % 4));
      if (!valid[h]) continue;
      if (kOptions == Options::kCommon || aligned) {
        *reinterpret_cast<uint4*>(out[h] + 32 * c) = *reinterpret_cast<const uint4*>(from);
      } else {
#pragma unroll 1
        for (int i = 0; i < 8; ++i) out[h][32 * c + i] = from[i];
      }
    }
    __syncwarp();
  }
}

// The same of lists, by the copy engine, which reads the rows out of the group's four tiles at `place`; each warp has
// its sixteen. `fragment(k, kk)` is the address of a fragment of tile k.
template <typename T, class Fragment>
__device__ inline void store_rows_by_map(const Params& p, const CUtensorMap* map, const Piece& piece,
                                         const RowState& rows, const RowSums& sums, int group, uint32_t place,
                                         const Fragment& fragment, float (&o)[128]) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x % kGroupThreads / 32;
  auto [lse, factor] = RowEnds(rows, sums, o);
#pragma unroll
  for (int h = 0; h < kRowsPerThread; ++h) {
    const int row = warp * 16 + lane / 4 + 8 * h;
    const bool valid = row < piece.num_rows;
    const RowPlace at = row_place(p, piece.first_row + (valid ? row : 0));
    factor[h] *= sink_factor(p, at.head, lse[h]);
    if (valid && group == 0 && lane % 4 == 0) store_lse(p, piece, at, lse[h]);
  }
#pragma unroll
  for (int f = 0; f < 16; ++f) {
    uint32_t words[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int at = 8 * f + 2 * i;
      words[i] = attnops::sm90::pack_pair<T>(o[at] * factor[i % 2], o[at + 1] * factor[i % 2]);
    }
    attnops::sm90::store_fragment(words, fragment(f / 4, f % 4));
  }
  attnops::sm90::fence_async_proxy();
  __syncwarp();
  if (lane == 0) {
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      attnops::sm90::store_box(map, place + k * kTileBytes + warp * 16 * 128, group * 256 + k * 64,
                               piece.first_row + warp * 16, piece.request);
    }
    attnops::sm90::commit_stores();
  }
  __syncwarp();
}

}  // namespace attnops::mla_decode::sm90
