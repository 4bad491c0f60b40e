#pragma once
#include "device/sm90/shared_words.cuh"
#include "xqa_decode/sm90/epilogue.cuh"

// Rows of a work that is not split go to out through shared memory: a lane holds few neighbouring values of many rows,
// and memory wants whole lines of one. Used where a pass has 16 rows and more.
namespace attnops::xqa_decode::sm90 {

// A row's values, behind one another; sixteen bytes lie at an odd place, so that eight rows' equal ones fall in
// different banks.
template <class Tr>
__device__ __forceinline__ uint32_t staged(int row, int vec) {
  return row * (Tr::kHeadDim * 2) + ((vec ^ (row & 7)) << 4);
}

// Two 8 x 8 blocks, transposed: lane l < 16 says where row l % 8 of block l / 8 goes.
__device__ __forceinline__ void store_two_transposed(const uint32_t (&a)[2], uint32_t address) {
  asm volatile("stmatrix.sync.aligned.m8n8.x2.trans.shared.b16 [%0], {%1, %2};" ::"r"(address), "r"(a[0]), "r"(a[1])
               : "memory");
}

// What a row's values must be multiplied by. Its lse is stored on the way, if `stores_lse`.
template <bool kRagged>
__device__ __forceinline__ float finish_row(const Params& p, const Shape& shape, const WorkPlace& place, int row,
                                            const RowEnd& end, float v_scale, bool stores_lse) {
  float factor = end.factor * v_scale;
  if (p.lse == nullptr && p.sinks == nullptr) return factor;
  const int token = shape.by_group.divide(row), head = place.kv_head * shape.group + row - token * shape.group;
  if (p.lse && stores_lse) {
    const ResultPlace<kRagged> to(p, shape, place.request);
    if (!to.is_nobodys(row)) p.lse[(to.token + token) * p.num_q_heads + head] = end.lse;
  }
  if (p.sinks && end.lse != -INFINITY) factor = __fdividef(factor, 1.f + __expf(__ldg(p.sinks + head) - end.lse));
  return factor;
}

// Up to eight values that may lie anywhere.
__device__ __noinline__ inline void store_odd_values(uint16_t* out, uint4 values, int count) {
  const uint32_t words[4] = {values.x, values.y, values.z, values.w};
#pragma unroll 1
  for (int i = 0; i < min_of(count, 8); ++i) {
    const uint32_t word = i < 4 ? (i < 2 ? words[0] : words[1]) : (i < 6 ? words[2] : words[3]);
    out[i] = static_cast<uint16_t>(i & 1 ? word >> 16 : word);
  }
}

// `count` staged rows to out, by kThreads threads that have met. `first_row`: of the work's rows, that is staged first.
template <class Tr, int kThreads>
__device__ __forceinline__ void store_staged(const Params& p, const Shape& shape, const Boxes& boxes,
                                             const WorkPlace& place, int first_row, int count, uint32_t stage,
                                             int thread) {
  constexpr int kVecs = Tr::kHeadDim / 8, kRowsAtATime = kThreads / kVecs;
  const int vec = thread % kVecs, d = vec * 8;
  if (d >= p.head_dim || thread >= kRowsAtATime * kVecs) return;
  const ResultPlace<is_ragged<Tr>()> to(p, shape, place.request);
  auto* const base = static_cast<uint16_t*>(p.out) + to.at + d;
  const auto load = [&](int i) {
    uint32_t words[4];
    hopper::load_words(words, stage + staged<Tr>(i, vec));
    return make_uint4(words[0], words[1], words[2], words[3]);
  };
  const auto place_of_row = [&](int i, int& token, int& head) {
    token = shape.by_group.divide(first_row + i);
    head = place.kv_head * shape.group + first_row + i - token * shape.group;
  };
  int token, head;
  if (boxes.vector_out) {
#pragma unroll 4
    for (int i = thread / kVecs; i < count; i += kRowsAtATime) {
      const uint4 values = load(i);
      if (to.is_nobodys(first_row + i)) continue;
      place_of_row(i, token, head);
      // Not by a pointer: the compiler would make four stores of it.
      asm volatile(
          "st.global.v4.b32 [%0], {%1, %2, %3, %4};" ::"l"(base + token * boxes.out_token + head * boxes.out_head),
          "r"(values.x), "r"(values.y), "r"(values.z), "r"(values.w)
          : "memory");
    }
    return;
  }
#pragma unroll 1
  for (int i = thread / kVecs; i < count; i += kRowsAtATime) {
    if (to.is_nobodys(first_row + i)) continue;
    place_of_row(i, token, head);
    store_odd_values(base + token * p.out_stride_token + head * p.out_stride_head, load(i), p.head_dim - d);
  }
}

// Ends rows whose dims lie in several warps, a thread each: their sums are added up, their lse is stored, and what
// their values must be multiplied by is in `factors`, [kRows] in shared memory, for all of them. `slot`: of a partial
// result; below zero: the rows are whole.
template <class Tr>
__device__ __forceinline__ void end_rows(const Params& p, const Shape& shape, const WorkPlace& place,
                                         const RowState<Tr>& block, int first_row, int64_t slot, float* exchange,
                                         float* factors) {
  static_assert(Tr::kRowTiles <= Tr::kWarps);
  const int warp = threadIdx.x / 32 % Tr::kWarps, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  block.share_sums({warp, lane, exchange});
  sync_group<Tr>();
  const int own = 8 * warp + 2 * t + g, row = first_row + own;
  if (warp < Tr::kRowTiles && g < 2 && row < shape.rows) {
    float reference = 0.f;
#pragma unroll
    for (int n = 0; n < Tr::kRowTiles; ++n) {
#pragma unroll
      for (int i = 0; i < 2; ++i) reference = n == warp && i == g ? block.reference[n][i] : reference;
    }
    const RowEnd end = row_end<Tr>(RowState<Tr>::whole_sum(exchange, own), reference);
    if (slot < 0) {
      const float v_scale = p.v_scale ? __ldg(p.v_scale + place.kv_head * p.v_scale_stride) : 1.f;
      factors[own] = finish_row<is_ragged<Tr>()>(p, shape, place, row, end, v_scale, true);
    } else {
      factors[own] = end.factor;
      p.lse_partial[slot * shape.rows + row] = end.lse;
    }
  }
  sync_group<Tr>();
}

// Such rows, ended. `stage` is free for all warps, and then until a barrier of theirs.
template <class Tr>
__device__ __forceinline__ void store_rows(const Params& p, const Shape& shape, const Boxes& boxes,
                                           const WorkPlace& place, const RowState<Tr>& block, int first_row,
                                           uint32_t stage, const float* factors) {
  const int warp = threadIdx.x / 32 % Tr::kWarps, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  const int count = min_of(shape.rows - first_row, Tr::kRows);
  const bool bf16 = p.dtype == DType::kBFloat16;
#pragma unroll
  for (int n = 0; n < Tr::kRowTiles; ++n) {
    if (8 * n >= count) break;
    const float factor[2] = {factors[8 * n + 2 * t], factors[8 * n + 2 * t + 1]};
#pragma unroll
    for (int b = 0; b < Tr::kBlocks; ++b) {
      const float(&out)[RowState<Tr>::kScores] = block.out[b];
      if constexpr (Tr::kFp8) {  // a lane has neighbouring dims of a row
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          const float x = factor[i] * out[4 * n + i], y = factor[i] * out[4 * n + 2 + i];
          const uint32_t pair = bf16 ? pack2<__nv_bfloat16>(x, y) : pack2<__half>(x, y);
          const uint32_t at = stage + staged<Tr>(8 * n + 2 * t + i, 8 * b + 2 * warp + g / 4) + g % 4 * 4;
          asm volatile("st.shared.b32 [%0], %1;" ::"r"(at), "r"(pair) : "memory");
        }
      } else {  // of two rows
        uint32_t pairs[2];
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          pairs[h] =
              hopper::pack_pair<typename Tr::T>(factor[0] * out[4 * n + 2 * h], factor[1] * out[4 * n + 2 * h + 1]);
        }
        store_two_transposed(pairs, stage + staged<Tr>(8 * n + lane % 8, 8 * b + 2 * warp + lane / 8 % 2));
      }
    }
  }
  sync_group<Tr>();
  store_staged<Tr, Tr::kGroupThreads>(p, shape, boxes, place, first_row, count, stage, threadIdx.x % Tr::kGroupThreads);
}

// Rows that are a warp's own, sixteen each.
template <class Tr>
__device__ __forceinline__ void store_rows(const Params& p, const Shape& shape, const Boxes& boxes,
                                           const WorkPlace& place, const WideBlock<Tr>& block, int first_row,
                                           uint32_t stage) {
  using T = typename Tr::T;
  const int warp = threadIdx.x / 32 % Tr::kWarps, lane = threadIdx.x % 32;
  const int own_first = first_row + 16 * warp, count = min_of(shape.rows - own_first, 16);
  if (count <= 0) return;
  stage += 16 * warp * (Tr::kHeadDim * 2);
  const bool bf16 = p.dtype == DType::kBFloat16;
  const float v_scale = p.v_scale ? __ldg(p.v_scale + place.kv_head * p.v_scale_stride) : 1.f;
  float factor[2];
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const int own = lane / 4 + 8 * h, row = own_first + min_of(own, count - 1);
    factor[h] = finish_row<is_ragged<Tr>()>(p, shape, place, row, row_end<Tr>(block.sum[h], block.reference[h]),
                                            v_scale, own < count && lane % 4 == 0);
  }
#pragma unroll
  for (int b = 0; b < Tr::kBlocks; ++b) {
#pragma unroll
    for (int n = 0; n < 8; n += 2) {
      uint32_t pairs[4];
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const int h = j % 2, at = 4 * (n + j / 2) + 2 * h;
        const float x = factor[h] * block.out[b][at], y = factor[h] * block.out[b][at + 1];
        pairs[j] = Tr::kFp8 && bf16 ? pack2<__nv_bfloat16>(x, y) : hopper::pack_pair<T>(x, y);
      }
      hopper::store_fragment(pairs, stage + staged<Tr>(lane % 16, 8 * b + n + lane / 16));
    }
  }
  __syncwarp();
  store_staged<Tr, 32>(p, shape, boxes, place, own_first, count, stage, lane);
}

}  // namespace attnops::xqa_decode::sm90
