#pragma once
#include "xqa_decode/cuda/kernel.cuh"
#include "xqa_decode/sm90/cluster/share.cuh"

namespace attnops::xqa_decode::sm90 {

// Starts the copies of the work's rows of q to where the first product reads them; rows beyond are zeros. They belong
// to the next group of copies. FP8 kernels scale their queries first, and do it themselves.
template <class Tr>
__device__ __forceinline__ void ask_for_queries(const Params& p, const Shape& shape, const WorkPlace& place,
                                                uint32_t queries) {
  constexpr int kVecs = Tr::kHeadDim / 8;  // of a row
#pragma unroll
  for (int at = threadIdx.x; at < Tr::kRows * kVecs; at += Tr::kThreads) {
    const int row = at / kVecs, column = at % kVecs;
    const int token = shape.by_group.divide(row);
    const int head = place.kv_head * shape.group + row - token * shape.group;
    const auto* from = static_cast<const typename Tr::T*>(p.q) + place.request * p.q_stride_request +
                       token * p.q_stride_token + head * p.q_stride_head + column * 8;
    const bool exists = row < shape.rows && column * 8 < p.head_dim;
    cp_async_16(queries + row * Tr::kHeadDim * 2 + ((column ^ (row & 7)) << 4), exists ? from : p.q, exists);
  }
}

// Waits for the copies of q and of the first chunk, or, over FP8 pages, fetches and scales q.
template <class Tr>
__device__ __forceinline__ void await_queries(const Params& p, const Shape& shape, const WorkPlace& place, int warp,
                                              int lane, uint8_t* smem) {
  if constexpr (Tr::kFp8) {
    using Shared = SharedLayout<Tr>;
    constexpr int kRowsPerWarp = Tr::kRows / Tr::kWarps;
    QueryRow<Tr> rows[kRowsPerWarp];
#pragma unroll
    for (int k = 0; k < kRowsPerWarp; ++k) rows[k].fetch(p, shape, place, warp + k * Tr::kWarps, lane);
#pragma unroll
    for (int k = 0; k < kRowsPerWarp; ++k) {
      rows[k].place(reinterpret_cast<typename Tr::T*>(smem + Shared::kQueries),
                    reinterpret_cast<float*>(smem + Shared::kRowScale), warp + k * Tr::kWarps, lane);
    }
  } else {
    cp_async_wait<Tr::kStages - 2>();
  }
  __syncthreads();
}

// The work's rows meet the share's keys, of which `stream` has asked for all stages but one. What the warps found lies
// in shared memory afterwards: kStats, and each warp's first stage.
template <class Tr, class Stream>
__device__ __forceinline__ void attend_share(const Params& p, const Shape& shape, const SharePiece& piece,
                                             const WorkPlace& place, Stream& stream, int warp, int lane,
                                             uint8_t* smem) {
  using Shared = SharedLayout<Tr>;
  await_queries<Tr>(p, shape, place, warp, lane, smem);
  RowTile<Tr> tile;
  {
    const float k_scale = p.k_scale ? __ldg(p.k_scale + place.kv_head * p.k_scale_stride) : 1.f;
    tile.begin(attnops::smem_address(smem) + Shared::kQueries, reinterpret_cast<float*>(smem + Shared::kRowScale),
               p.softmax_scale * k_scale * kLog2e, lane);
  }
  const int rounds = num_rounds<Tr>(num_chunks<Tr>(piece), warp);
  // Keys [all_begin, all_end) are seen by every row. A tree may hide even the first new token.
  const int all_end = p.causal || p.tree_mask
                          ? min_of(piece.length() - (p.tree_mask ? p.tree_keys : p.seqlen_q - 1), piece.keys().end)
                          : piece.keys().end;
  const int all_begin = p.window_left < 0 ? 0 : piece.length() - 1 - p.window_left;
  const int ring = Shared::kRing + warp * Tr::kRingBytes;
  int head = 0;  // the stage to compute with next; the one before it is free

  for (int round = 0; round < rounds; ++round) {
    __syncwarp();  // everybody is done with the free stage
    stream.issue(head == 0 ? Tr::kStages - 1 : head - 1);
    cp_async_wait<Tr::kStages - 1>();
    __syncwarp();  // everybody's keys have come
    const uint32_t stage = attnops::smem_address(smem) + ring + head * Tr::kStageBytes;
    const int first_key = piece.first_token() + (round * Tr::kWarps + warp) * Tr::kChunk;
    float scores[Tr::kKeyTiles][Tr::kRowTiles][4] = {};
    uint32_t probs[Tr::kKeyTiles][Tr::kRowTiles][2];
    tile.multiply_keys(stage, lane, scores);
    tile.scale_scores(p.logit_cap, scores);
    if (first_key + Tr::kChunk > all_end || first_key < all_begin) {
      RowTile<Tr>::mask_scores(p, shape, piece, 0, first_key, ~0u, lane, scores);
    }
    tile.soften(scores, probs);
    tile.multiply_values(stage + Tr::kChunk * Tr::kKeyBytes, lane, probs);
    head = head + 1 == Tr::kStages ? 0 : head + 1;
  }
  __syncwarp();
  auto* stats = reinterpret_cast<float2*>(smem + Shared::kStats);
  tile.leave(reinterpret_cast<float*>(smem + ring), stats + warp * Tr::kRows, lane);
  __syncthreads();
}

}  // namespace attnops::xqa_decode::sm90
