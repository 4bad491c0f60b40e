#pragma once
#include <cmath>

#include "device/sm80/mma.cuh"
#include "xqa_decode/cuda/merge.cuh"

namespace attnops::xqa_decode {

// A row of q in a warp's registers, padded with zeros: a lane has the pairs lane, lane + 32, ...
template <class Tr>
struct QueryRow {
  static constexpr int kPairs = Tr::kHeadDim / 64;  // of a lane
  uint32_t pairs[kPairs];                           // as they lie in q: nobody waits for them before `place`
  bool bf16;

  __device__ void fetch(const Params& p, const Shape& shape, const WorkPlace& place, int row, int lane) {
    const int token = shape.by_group.divide(row);
    const int head = place.kv_head * shape.group + row - token * shape.group;
    const int64_t at = place.request * p.q_stride_request + token * p.q_stride_token + head * p.q_stride_head;
    const uint16_t* q = static_cast<const uint16_t*>(p.q) + at;
    bf16 = p.dtype == DType::kBFloat16;
#pragma unroll
    for (int i = 0; i < kPairs; ++i) {
      const int d = (i * 32 + lane) * 2;
      pairs[i] = 0;
      if (row >= shape.rows || d >= p.head_dim) continue;
      if (shape.pair_queries) {
        pairs[i] = *reinterpret_cast<const uint32_t*>(q + d);
      } else {
        pairs[i] = q[d] | (d + 1 < p.head_dim ? static_cast<uint32_t>(q[d + 1]) << 16 : 0u);
      }
    }
  }

  __device__ float2 unpack(uint32_t pair) const {
    if (bf16) return make_float2(__uint_as_float(pair << 16), __uint_as_float(pair & 0xffff0000u));
    return __half22float2(*reinterpret_cast<const __half2*>(&pair));
  }

  // To shared memory as the first product reads it. FP8 pages are multiplied in fp16, whose range is smaller than that
  // of bf16: the row is scaled by a power of two, exact for all but values 2^-28 below its largest, and the scale goes
  // into that of the scores.
  __device__ void place(typename Tr::T* queries, float* row_scale, int i, int lane) const {
    float scale = 1.f;
    float2 values[kPairs];
#pragma unroll
    for (int k = 0; k < kPairs; ++k) values[k] = unpack(pairs[k]);
    if constexpr (Tr::kFp8) {
      float top = 0.f;
#pragma unroll
      for (int k = 0; k < kPairs; ++k) top = fmaxf(top, fmaxf(fabsf(values[k].x), fabsf(values[k].y)));
#pragma unroll
      for (int step = 16; step > 0; step /= 2) top = fmaxf(top, __shfl_xor_sync(~0u, top, step));
      if (top > 0.f && top < INFINITY) {
        scale = exp2f(static_cast<float>(min_of(max_of(14 - ilogbf(top), -100), 100)));
      }
      if (lane == 0) row_scale[i] = 1.f / scale;
    }
    auto* words = reinterpret_cast<uint32_t*>(queries);
#pragma unroll
    for (int k = 0; k < kPairs; ++k) {
      const int pair = k * 32 + lane, in_step = pair & 7;
      // FP8 lanes of the product hold four neighbouring dims, as two k-pairs 8 apart.
      const int at = Tr::kFp8 ? (pair & ~7) + (in_step >> 1) + (in_step & 1) * 4 : pair;
      words[Tr::query_word(i, at)] = pack2<typename Tr::T>(values[k].x * scale, values[k].y * scale);
    }
  }
};

}  // namespace attnops::xqa_decode
