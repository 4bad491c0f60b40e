#pragma once
#include "device/common/pdl.cuh"
#include "device/common/vec.h"
#include "xqa_decode/cuda/key_stream.cuh"
#include "xqa_decode/cuda/merge.cuh"
#include "xqa_decode/cuda/query_row.cuh"
#include "xqa_decode/cuda/row_tile.cuh"

namespace attnops::xqa_decode {

// A barrier of the warps that share their keys.
__device__ inline void sync_group(int group, int threads) {
  if (threads == 32) {
    __syncwarp();
  } else {
    asm volatile("bar.sync %0, %1;\n" ::"r"(group + 1), "r"(threads) : "memory");
  }
}

// What the warps found of a piece, put together and stored: the output, or a partial result. `thread` of theirs.
template <class Tr>
__device__ void store_piece(const Params& p, const Shape& shape, const WorkPlace& place, const Splits& splits,
                            int first_row, const uint8_t* smem, unsigned thread = threadIdx.x) {
  using Shared = SharedLayout<Tr>;
  const auto* stats = reinterpret_cast<const float2*>(smem + Shared::kStats);
  const int* free_stage = reinterpret_cast<const int*>(smem + Shared::kFree);
  const int rows = min_of(shape.rows - first_row, shape.row_groups * Tr::kRows);
  constexpr int kVecs = Tr::kHeadDim / 4;
  const int64_t slot = splits.slot(splits.index);
#pragma unroll 1
  for (int item = thread; item < rows * kVecs; item += Tr::kThreads) {
    const int d = item % kVecs * 4;
    if (d >= p.head_dim) continue;
    const int row_group = item / kVecs / Tr::kRows, row = item / kVecs % Tr::kRows;
    float2 stat[Tr::kWarps];  // of the warps that had these rows; nothing, for the others
    float top = -INFINITY;
#pragma unroll
    for (int w = 0; w < Tr::kWarps; ++w) {
      stat[w] = stats[w * Tr::kRows + row];
      if ((w & (shape.row_groups - 1)) != row_group) stat[w] = make_float2(-INFINITY, 0.f);
      top = fmaxf(top, stat[w].x);
    }
    float sum = 0.f;
    float4 total = {0.f, 0.f, 0.f, 0.f};
#pragma unroll
    for (int w = 0; w < Tr::kWarps; ++w) {
      const auto v = *reinterpret_cast<const float4*>(smem + free_stage[w] + 4 * RowTile<Tr>::scratch_at(row, d));
      if (stat[w].x == -INFINITY && stat[w].y == 0.f) continue;
      const float factor = exp2_approx(stat[w].x - top);
      sum += factor * stat[w].y;
      total.x += factor * v.x, total.y += factor * v.y, total.z += factor * v.z, total.w += factor * v.w;
    }
    const bool empty = sum == 0.f;
    const float inverse = empty ? 0.f : __fdividef(1.f, sum);
    const float lse = empty ? -INFINITY : (top - Tr::kProbShift + __log2f(sum)) * kLn2;
    total.x *= inverse, total.y *= inverse, total.z *= inverse, total.w *= inverse;
    if (splits.count > 1) {
      store_partial(p, shape, slot * shape.rows + first_row + item / kVecs, d, total, lse);
    } else {
      store_output(p, shape, place, first_row + item / kVecs, d, total, lse);
    }
  }
}

// One CTA per part of the plan. Each warp streams its share of the keys; at the end of a piece the warps put their
// results together, while the copies of the next piece are already on their way.
template <class Tr>
__global__ void __launch_bounds__(Tr::kThreads, Tr::kCtasPerSm)
    xqa_decode_kernel(const __grid_constant__ Params p, const __grid_constant__ Shape shape) {
  using Shared = SharedLayout<Tr>;
  extern __shared__ __align__(1024) uint8_t smem[];
  auto* stats = reinterpret_cast<float2*>(smem + Shared::kStats);
  int* free_stage = reinterpret_cast<int*>(smem + Shared::kFree);
  auto* flag = reinterpret_cast<MergeFlag*>(smem + Shared::kFlag);
  auto* row_scale = reinterpret_cast<float*>(smem + Shared::kRowScale);
  auto* queries = reinterpret_cast<typename Tr::T*>(smem + Shared::kQueries);
  const int warp = __shfl_sync(~0u, threadIdx.x / 32, 0), lane = threadIdx.x % 32;
  const int row_group = warp & (shape.row_groups - 1);      // which rows this warp computes
  const int group = (warp - row_group) / shape.row_groups;  // whose keys it computes with
  const int group_first_warp = warp - row_group;
  const int group_threads = 32 * shape.row_groups;

  wait_for_earlier_kernels();
  let_next_kernel_start();

  const PartEntry entry(p, shape, static_cast<int>(blockIdx.x));
  if (!entry.has_work) return;

  const uint32_t ring = smem_address(smem) + Shared::kRing;
  const auto* good_keys = reinterpret_cast<const uint32_t*>(smem + Shared::kGoodKeys);
  PieceWalk piece(p, shape, entry, static_cast<int>(blockIdx.x));
  if (!piece.next()) return;
  KeyStream<Tr> stream(p, shape, piece, warp, lane, smem);
  int head = 0;  // the stage to compute with next; the one before it is free
#pragma unroll 1
  for (int s = -1; s < Tr::kStages - 1; ++s) stream.issue(s);

  constexpr int kRowsPerWarp = Tr::kRows / Tr::kWarps;
  QueryRow<Tr> rows[kRowsPerWarp];  // of the next piece: asked for before the results of this one are stored
  const auto fetch_rows = [&](int i) {
    const WorkPlace place{piece.work(), piece.request(), piece.kv_head()};
    const int first_row = piece.row_block() * shape.row_groups * Tr::kRows;
#pragma unroll
    for (int k = 0; k < kRowsPerWarp; ++k) rows[k].fetch(p, shape, place, first_row + i + k * Tr::kWarps, lane);
  };
  fetch_rows(warp);
  bool more = true;
#pragma unroll 1
  while (more) {
    const WorkPlace place{piece.work(), piece.request(), piece.kv_head()};
    if (piece.overflows()) {
      if (piece.starts_work() && piece.last_row_block()) store_nan(p, shape, place, piece.splits());
      more = piece.next();
      if (more) fetch_rows(warp);
      continue;
    }
    const int first_row = piece.row_block() * shape.row_groups * Tr::kRows;
#pragma unroll 1
    for (int i = warp; !piece.continues_run();) {
#pragma unroll
      for (int k = 0; k < kRowsPerWarp; ++k) rows[k].place(queries, row_scale, i + k * Tr::kWarps, lane);
      i += Tr::kRows;
      if (i >= shape.row_groups * Tr::kRows) break;
      fetch_rows(i);
    }
    __syncthreads();
    RowTile<Tr> tile;
    {
      const float k_scale = p.k_scale ? __ldg(p.k_scale + place.kv_head * p.k_scale_stride) : 1.f;
      const int row = row_group * Tr::kRows;
      tile.begin(smem_address(queries + row * Tr::kHeadDim), row_scale + row, p.softmax_scale * k_scale * kLog2e, lane);
    }
    const int chunks = num_chunks<Tr>(piece);
    const int rounds = num_rounds<Tr>(chunks, group_first_warp);
    // Keys [all_begin, all_end) are seen by every row. A tree may hide even the first new token.
    const int all_end = p.causal || p.tree_mask
                            ? min_of(piece.length() - (p.tree_mask ? p.tree_keys : p.seqlen_q - 1), piece.keys().end)
                            : piece.keys().end;
    const int all_begin = p.window_left < 0 ? 0 : piece.length() - 1 - p.window_left;

    for (int round = 0; round < rounds; ++round) {
      sync_group(group, group_threads);  // everybody is done with the free stage
      stream.issue(head == 0 ? Tr::kStages - 1 : head - 1);
      cp_async_wait<Tr::kStages - 1>();
      sync_group(group, group_threads);  // everybody's keys have come
      for (int i = 0; i < shape.row_groups; ++i) {
        const int chunk = round * Tr::kWarps + group_first_warp + i;
        if (chunk >= chunks) break;
        const uint32_t stage = ring + (group_first_warp + i) * Tr::kRingBytes + head * Tr::kStageBytes;
        const int first_key = piece.first_token() + chunk * Tr::kChunk;
        float scores[Tr::kKeyTiles][Tr::kRowTiles][4] = {};
        uint32_t probs[Tr::kKeyTiles][Tr::kRowTiles][2];
        tile.multiply_keys(stage, lane, scores);
        tile.scale_scores(p.logit_cap, scores);
        if (first_key + Tr::kChunk > all_end || first_key < all_begin || p.report) {
          const unsigned good = p.report ? good_keys[(group_first_warp + i) * Tr::kStages + head] : ~0u;
          RowTile<Tr>::mask_scores(p, shape, piece, first_row + row_group * Tr::kRows, first_key, good, lane, scores);
        }
        tile.soften(scores, probs);
        tile.multiply_values(stage + Tr::kChunk * Tr::kKeyBytes, lane, probs);
      }
      head = head + 1 == Tr::kStages ? 0 : head + 1;
    }
    // A group that has a round less passes as many barriers as the first. Nothing needs that but racecheck, which
    // counts them (docs/sanitizer.md).
    if (rounds < num_rounds<Tr>(chunks, 0)) {
      sync_group(group, group_threads);
      sync_group(group, group_threads);
    }

    sync_group(group, group_threads);
    const int free_offset =
        Shared::kRing + warp * Tr::kRingBytes + (head == 0 ? Tr::kStages - 1 : head - 1) * Tr::kStageBytes;
    tile.leave(reinterpret_cast<float*>(smem + free_offset), stats + warp * Tr::kRows, lane);
    if (lane == 0) free_stage[warp] = free_offset;
    __syncthreads();
    const Splits splits = piece.splits();
    const bool merge = splits.count > 1 && splits.arrivals > 0 && piece.last_row_block(), last = piece.is_last();
    more = piece.next();
    if (more && !piece.continues_run()) fetch_rows(warp);
    store_piece<Tr>(p, shape, place, splits, first_row, smem);
    if (merge) {
      arrive_and_merge<Tr::kThreads>(p, shape, place, splits, last, flag,
                                     reinterpret_cast<float*>(smem + free_stage[0]));
    }
  }
}

}  // namespace attnops::xqa_decode
