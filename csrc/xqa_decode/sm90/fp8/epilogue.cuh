#pragma once
#include "xqa_decode/cuda/merge.cuh"
#include "xqa_decode/sm90/fp8/row_block.cuh"

namespace attnops::xqa_decode::sm90::fp8 {

// What a row's sums say: what its values must be multiplied by, and its natural log of the sum.
struct RowEnd {
  float factor, lse;

  template <class Tr>
  __device__ __forceinline__ RowEnd(const RowBlock<Tr>& block, int n, int i) {
    const float sum = block.sum[n][i];
    factor = sum == 0.f ? 0.f : __fdividef(1.f, sum);
    lse = sum == 0.f ? -INFINITY : (block.reference[n][i] - Tr::kProbShift + __log2f(sum)) * kLn2;
  }
};

// Stores the rows as the partial result in row `slot`, both groups their block. Eight lanes write 64 neighbouring
// bytes.
template <class Tr>
__device__ __forceinline__ void store_partials(const Params& p, const Shape& shape, const RowBlock<Tr>& block,
                                               int first_row, int64_t slot) {
  const Thread<Tr> me;
  const int g = me.lane / 4, t = me.lane % 4, d = 64 * me.group + 16 * me.warp + 2 * g;
#pragma unroll
  for (int n = 0; n < Tr::kRowTiles; ++n) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int row = first_row + 8 * n + 2 * t + i;
      if (row >= shape.rows) continue;
      const RowEnd end(block, n, i);
      const int64_t at = slot * shape.rows + row;
      if (me.group + me.warp + g == 0) p.lse_partial[at] = end.lse;
      float* out = p.out_partial + at * p.head_dim + d;
      const float x = end.factor * block.out[0][4 * n + i], y = end.factor * block.out[0][4 * n + 2 + i];
      if (shape.wide_partials) {
        if (d < p.head_dim) *reinterpret_cast<float2*>(out) = make_float2(x, y);
      } else {
        if (d < p.head_dim) out[0] = x;
        if (d + 1 < p.head_dim) out[1] = y;
      }
    }
  }
}

// Stores the rows as output.
template <class Tr>
__device__ __forceinline__ void store_rows(const Params& p, const Shape& shape, const WorkPlace& place,
                                           const RowBlock<Tr>& block, int first_row) {
  const Thread<Tr> me;
  const int g = me.lane / 4, t = me.lane % 4, d = 64 * me.group + 16 * me.warp + 2 * g;
  const float v_scale = p.v_scale ? __ldg(p.v_scale + place.kv_head * p.v_scale_stride) : 1.f;
  const bool bf16 = p.dtype == DType::kBFloat16;
#pragma unroll
  for (int n = 0; n < Tr::kRowTiles; ++n) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int row = first_row + 8 * n + 2 * t + i;
      if (row >= shape.rows) continue;
      const int token = shape.by_group.divide(row);
      const int head = place.kv_head * shape.group + row - token * shape.group;
      const RowEnd end(block, n, i);
      if (p.lse && me.group + me.warp + g == 0) {
        p.lse[(static_cast<int64_t>(place.request) * p.seqlen_q + token) * p.num_q_heads + head] = end.lse;
      }
      float factor = end.factor * v_scale;
      if (p.sinks && end.lse != -INFINITY) factor = __fdividef(factor, 1.f + __expf(__ldg(p.sinks + head) - end.lse));
      const float x = factor * block.out[0][4 * n + i], y = factor * block.out[0][4 * n + 2 + i];
      const uint32_t pair = bf16 ? pack2<__nv_bfloat16>(x, y) : pack2<__half>(x, y);
      auto* out = static_cast<uint16_t*>(p.out) + place.request * p.out_stride_request + token * p.out_stride_token +
                  head * p.out_stride_head + d;
      if (shape.vector_out) {
        if (d < p.head_dim) *reinterpret_cast<uint32_t*>(out) = pair;
      } else {
        if (d < p.head_dim) out[0] = static_cast<uint16_t>(pair);
        if (d + 1 < p.head_dim) out[1] = static_cast<uint16_t>(pair >> 16);
      }
    }
  }
}

}  // namespace attnops::xqa_decode::sm90::fp8
