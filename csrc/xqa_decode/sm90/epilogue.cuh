#pragma once
#include "xqa_decode/cuda/merge.cuh"
#include "xqa_decode/sm90/fp8/lone_block.cuh"
#include "xqa_decode/sm90/fp8/widened_block.cuh"
#include "xqa_decode/sm90/request_rows.cuh"
#include "xqa_decode/sm90/row_block.cuh"
#include "xqa_decode/sm90/wide_block.cuh"

namespace attnops::xqa_decode::sm90 {

template <class Tr>
using Block = std::conditional_t<
    Tr::kWidens, fp8::ScaledBlock<Tr>,
    std::conditional_t<Tr::kFp8, fp8::LoneBlock<Tr>, std::conditional_t<Tr::kRows >= 64, WideBlock<Tr>, RowBlock<Tr>>>>;

// Of the two dims 64 b + 16 warp + .. that a lane holds, by g = lane / 4.
template <class Tr>
__device__ __forceinline__ constexpr int lane_dim(int g, int h) {
  return Tr::kFp8 ? 2 * g + h : g + 8 * h;
}

// What a row's sums say: what its accumulators must be multiplied by, and its natural log of the sum.
struct RowEnd {
  float factor, lse;
};

template <class Tr>
__device__ __forceinline__ RowEnd row_end(float sum, float reference) {
  if (sum == 0.f) return {0.f, -INFINITY};
  return {__fdividef(1.f, sum), (reference - Tr::kProbShift + __log2f(sum)) * kLn2};
}

// kIsNode: the rows are those of a node of the batch-invariant tree, divided by their sums already (fold.cuh).
template <bool kIsNode = false, class Tr>
__device__ __forceinline__ RowEnd end_of(const RowState<Tr>& block, int n, int i) {
  if constexpr (kIsNode) return {1.f, block.reference[n][i]};
  return row_end<Tr>(block.sum[n][i], block.reference[n][i]);
}

// Stores the pass's rows as the partial result in row `slot`. Eight lanes write 32 neighbouring bytes. `factors`: where
// `end_rows` has ended them.
template <bool kIsNode = false, class Tr>
__device__ __forceinline__ void store_partials(const Params& p, const Shape& shape, const RowState<Tr>& block,
                                               int first_row, int64_t slot, const float* factors = nullptr) {
  const int warp = threadIdx.x / 32, g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
#pragma unroll
  for (int n = 0; n < Tr::kRowTiles; ++n) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int row = first_row + 8 * n + 2 * t + i;
      if (row >= shape.rows) continue;
      const int64_t at = slot * shape.rows + row;
      float factor;
      if constexpr (Tr::kEndsOnce && !kIsNode) {
        factor = factors[8 * n + 2 * t + i];
      } else {
        const RowEnd end = end_of<kIsNode>(block, n, i);
        factor = end.factor;
        if (warp == 0 && g == 0) p.lse_partial[at] = end.lse;
      }
      float* out = p.out_partial + at * p.head_dim;
#pragma unroll
      for (int b = 0; b < Tr::kBlocks; ++b) {
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          const int d = 64 * b + 16 * warp + lane_dim<Tr>(g, h);
          if (d < p.head_dim) out[d] = factor * block.out[b][4 * n + 2 * h + i];
        }
      }
    }
  }
}

// Stores the rows as output where a lane holds neighbouring dims. Eight lanes write 32 neighbouring bytes.
template <bool kIsNode, class Tr>
__device__ __forceinline__ void store_row_pairs(const Params& p, const Shape& shape, const WorkPlace& place,
                                                const RowState<Tr>& block, int first_row) {
  const int warp = threadIdx.x / 32, g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
  const float v_scale = p.v_scale ? __ldg(p.v_scale + place.kv_head * p.v_scale_stride) : 1.f;
  const bool bf16 = p.dtype == DType::kBFloat16;
  const ResultPlace<is_ragged<Tr>()> to(p, shape, place.request);
#pragma unroll
  for (int n = 0; n < Tr::kRowTiles; ++n) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int row = first_row + 8 * n + 2 * t + i;
      if (row >= shape.rows || to.is_nobodys(row)) continue;
      const int token = shape.by_group.divide(row);
      const int head = place.kv_head * shape.group + row - token * shape.group;
      const RowEnd end = end_of<kIsNode>(block, n, i);
      if (p.lse && warp == 0 && g == 0) {
        p.lse[(to.token + token) * p.num_q_heads + head] = end.lse;
      }
      float factor = end.factor * v_scale;
      if (p.sinks && end.lse != -INFINITY) factor = __fdividef(factor, 1.f + __expf(__ldg(p.sinks + head) - end.lse));
      auto* out = static_cast<uint16_t*>(p.out) + to.at + token * p.out_stride_token + head * p.out_stride_head;
#pragma unroll
      for (int b = 0; b < Tr::kBlocks; ++b) {
        const int d = 64 * b + 16 * warp + 2 * g;
        const float x = factor * block.out[b][4 * n + i], y = factor * block.out[b][4 * n + 2 + i];
        const uint32_t pair = bf16 ? pack2<__nv_bfloat16>(x, y) : pack2<__half>(x, y);
        if (shape.vector_out) {
          if (d < p.head_dim) *reinterpret_cast<uint32_t*>(out + d) = pair;
        } else {
          if (d < p.head_dim) out[d] = static_cast<uint16_t>(pair);
          if (d + 1 < p.head_dim) out[d + 1] = static_cast<uint16_t>(pair >> 16);
        }
      }
    }
  }
}

// Stores the pass's rows as output. Neighbouring dims lie in lanes 4 apart: of two rows and two dims each of the two
// lanes ends up with one row.
template <bool kIsNode = false, class Tr>
__device__ __forceinline__ void store_rows(const Params& p, const Shape& shape, const WorkPlace& place,
                                           const RowState<Tr>& block, int first_row) {
  if constexpr (Tr::kFp8) return store_row_pairs<kIsNode>(p, shape, place, block, first_row);
  using T = typename Tr::T;
  const int warp = threadIdx.x / 32, g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
  const int odd = g & 1;
  const ResultPlace<is_ragged<Tr>()> to(p, shape, place.request);
  const float v_scale = p.v_scale ? __ldg(p.v_scale + place.kv_head * p.v_scale_stride) : 1.f;
#pragma unroll
  for (int n = 0; n < Tr::kRowTiles; ++n) {
    if (first_row + 8 * n >= shape.rows) break;
    float factor[2];
    int64_t own = 0;
    const int own_row = first_row + 8 * n + 2 * t + odd;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int row = min_of(first_row + 8 * n + 2 * t + i, shape.rows - 1);
      const int token = shape.by_group.divide(row);
      const int head = place.kv_head * shape.group + row - token * shape.group;
      const RowEnd end = end_of<kIsNode>(block, n, i);
      factor[i] = end.factor * v_scale;
      if (p.sinks && end.lse != -INFINITY) {
        factor[i] = __fdividef(factor[i], 1.f + __expf(__ldg(p.sinks + head) - end.lse));
      }
      if (i != odd) continue;
      own = to.at + token * p.out_stride_token + head * p.out_stride_head;
      if (p.lse && warp == 0 && g < 2 && own_row < shape.rows && !to.is_nobodys(own_row)) {
        p.lse[(to.token + token) * p.num_q_heads + head] = end.lse;
      }
    }
    auto* out = static_cast<T*>(p.out) + own;
#pragma unroll
    for (int b = 0; b < Tr::kBlocks; ++b) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const float even_row = factor[0] * block.out[b][4 * n + 2 * h];
        const float odd_row = factor[1] * block.out[b][4 * n + 2 * h + 1];
        const float other = __shfl_xor_sync(~0u, odd ? even_row : odd_row, 4);
        const uint32_t pair = odd ? hopper::pack_pair<T>(other, odd_row) : hopper::pack_pair<T>(even_row, other);
        const int d = 64 * b + 16 * warp + 8 * h + g - odd;
        if (own_row >= shape.rows || to.is_nobodys(own_row) || d >= p.head_dim) continue;
        if (shape.vector_out) {
          *reinterpret_cast<uint32_t*>(out + d) = pair;
        } else {
          const T* halves = reinterpret_cast<const T*>(&pair);
          out[d] = halves[0];
          if (d + 1 < p.head_dim) out[d + 1] = halves[1];
        }
      }
    }
  }
}

// The same of 64 rows: a row's dims lie in four lanes, which write 32 neighbouring bytes.
template <class Tr>
__device__ __forceinline__ void store_partials(const Params& p, const Shape& shape, const WideBlock<Tr>& block,
                                               int first_row, int64_t slot) {
  const int warp = threadIdx.x / 32 % Tr::kWarps, g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const int row = first_row + 16 * warp + g + 8 * h;
    if (row >= shape.rows) continue;
    const RowEnd end = row_end<Tr>(block.sum[h], block.reference[h]);
    const int64_t at = slot * shape.rows + row;
    if (t == 0) p.lse_partial[at] = end.lse;
    float* out = p.out_partial + at * p.head_dim;
#pragma unroll
    for (int b = 0; b < Tr::kBlocks; ++b) {
#pragma unroll
      for (int n = 0; n < 8; ++n) {
        const int d = 64 * b + 8 * n + 2 * t;
        const float x = end.factor * block.out[b][4 * n + 2 * h], y = end.factor * block.out[b][4 * n + 2 * h + 1];
        if (shape.wide_partials) {
          if (d < p.head_dim) *reinterpret_cast<float2*>(out + d) = make_float2(x, y);
        } else {
          if (d < p.head_dim) out[d] = x;
          if (d + 1 < p.head_dim) out[d + 1] = y;
        }
      }
    }
  }
}

}  // namespace attnops::xqa_decode::sm90
