#pragma once
#include "device/common/pdl.cuh"
#include "device/common/vec.h"
#include "sparse_indexer/rows.h"

// What selection writes: four outputs of a row at a time where the row's memory allows it and nothing is recorded.
namespace attnops::sparse_indexer {

using Quad = Vec<int32_t, 4>;

// A row's outputs from the `first` one on.
struct RowOutputs {
  int32_t *indices, *positions;  // positions: or null
  bool quads;                    // written four at a time

  __device__ RowOutputs(const SelectParams& p, int64_t row, uint32_t first)
      : indices(p.indices + row * p.stride_indices + first),
        positions(p.positions != nullptr ? p.positions + row * p.stride_positions + first : nullptr) {
    const auto bits = reinterpret_cast<uintptr_t>(indices) | reinterpret_cast<uintptr_t>(positions);
    quads = bits % sizeof(Quad) == 0 && p.report == nullptr;
  }
};

// Indices of the first `count` positions; -1 for others. All loads come before what they say is looked at.
__device__ inline Quad indices_of(const SelectParams& p, int64_t row, int64_t request, const Quad& positions,
                                  int count) {
  Quad found;
#pragma unroll
  for (int i = 0; i < 4; ++i) found.data[i] = i < count ? find_index(p, row, request, positions.data[i]) : -1;
  return found;
}

// The same for neighbours, which pages of one token need a single load for.
__device__ inline Quad indices_from(const SelectParams& p, int64_t row, int64_t request, const Quad& positions,
                                    int count) {
  const bool alone = p.page_table != nullptr && p.page_size == 1 && !p.lengths_are_ends;
  if (alone && count == 4 && positions.data[3] < p.max_pages) {
    const int32_t* const cells = p.page_table + request * p.stride_table + positions.data[0];
    if (reinterpret_cast<uintptr_t>(cells) % sizeof(Quad) == 0) {
      const auto pages = load_vec<Quad>(cells);
      if ((pages.data[0] | pages.data[1] | pages.data[2] | pages.data[3]) >= 0) return pages;
    }
  }
  return indices_of(p, row, request, positions, count);
}

// All keys of a row that has no more than k, by threads `first`, `first + step`, ... of those that share it.
__device__ inline void take_all(const SelectParams& p, int64_t row, const RowKeys& keys, int first, int step) {
  const RowOutputs outputs(p, row, 0);
  const int count = static_cast<int>(keys.count), quads = outputs.quads ? p.k / 4 : 0;
#pragma unroll 1
  for (int quad = first; quad < quads; quad += step) {
    const int at = 4 * quad, has = min_of(max_of(count - at, 0), 4);
    Quad positions{at, at + 1, at + 2, at + 3};
    store_vec(outputs.indices + at, indices_from(p, row, keys.request, positions, has));
    if (outputs.positions == nullptr) continue;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if (i >= has) positions.data[i] = -1;
    }
    store_vec(outputs.positions + at, positions);
  }
#pragma unroll 1
  for (int i = 4 * quads + first; i < p.k; i += step) {
    outputs.indices[i] = i < count ? index_of(p, row, keys.request, i) : -1;
    if (outputs.positions != nullptr) outputs.positions[i] = i < count ? i : -1;
  }
}

// Positions in their order, from 16-byte boundaries of shared memory to where they belong among those of the row.
__device__ inline void write_positions(const SelectParams& p, int64_t row, int64_t request, const int32_t* staged,
                                       uint32_t first, uint32_t count, uint32_t threads) {
  const RowOutputs outputs(p, row, first);
  const uint32_t quads = outputs.quads ? count / 4 : 0;
#pragma unroll 1
  for (uint32_t quad = threadIdx.x; quad < quads; quad += threads) {
    const auto positions = load_vec<Quad>(staged + 4 * quad);
    store_vec(outputs.indices + 4 * quad, indices_of(p, row, request, positions, 4));
    if (outputs.positions != nullptr) store_vec(outputs.positions + 4 * quad, positions);
  }
#pragma unroll 1
  for (uint32_t i = 4 * quads + threadIdx.x; i < count; i += threads) {
    const int position = staged[i];
    outputs.indices[i] = index_of(p, row, request, position);
    if (outputs.positions != nullptr) outputs.positions[i] = position;
  }
}

inline constexpr int kTakeThreads = 256, kTakeWarps = kTakeThreads / 32;
inline constexpr int kMostTakeQuads = 4;  // of a lane

// Where rows have no more than k columns: logits are not read. A row has `parts` warps.
inline __global__ void __launch_bounds__(kTakeThreads, 2048 / kTakeThreads)
    topk_take_all_kernel(const __grid_constant__ SelectParams p, const __grid_constant__ int parts) {
  const int warp = static_cast<int>(blockIdx.x) * kTakeWarps + static_cast<int>(threadIdx.x) / 32;
  const int row = warp / parts, part = warp - row * parts, lane = threadIdx.x % 32;
  wait_for_earlier_kernels();
  let_next_kernel_start();
  if (row >= p.num_rows) return;
  if (p.report != nullptr && part == 0 && lane == 0) report_row(p, row);
  take_all(p, row, keys_of(p, row), part * 32 + lane, parts * 32);
}

}  // namespace attnops::sparse_indexer
