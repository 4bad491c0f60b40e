#include "device/common/launch_dependent.cuh"
#include "device/common/pdl.cuh"
#include "sparse_indexer/cuda/launch.h"
#include "sparse_indexer/topk_pieces.h"

// Between the pieces of index_topk: a CTA a row.
namespace attnops::sparse_indexer {
namespace {

constexpr int kThreads = 256, kEach = kMaxSelected / kThreads;

// Before the first piece: faults, rows without keys, and what the others have in it.
__global__ void __launch_bounds__(kThreads) begin_pieces_kernel(const __grid_constant__ PieceParams p) {
  wait_for_earlier_kernels();
  let_next_kernel_start();
  const int64_t row = blockIdx.x;
  const int thread = static_cast<int>(threadIdx.x);
  const RowKeys keys = keys_of(p.select, row);
  if (p.logits.report != nullptr) {
    report_all(p, row, [&](int64_t count, const auto& run) {
      for (int64_t i = thread; i < count; i += kThreads) run(i);
    });
  }
  if (keys.count == 0) {
    for (int i = thread; i < p.select.k; i += kThreads) put(p, row, keys, i, -1);
  }
  if (thread == 0) begin_piece(p, row, keys, 0, 0);
}

// After a piece: a row's candidates, or its results behind its last one.
__global__ void __launch_bounds__(kThreads) carry_candidates_kernel(const __grid_constant__ PieceParams p) {
  wait_for_earlier_kernels();
  let_next_kernel_start();
  const int64_t row = blockIdx.x, next_key = p.first_key + p.keys;
  const int thread = static_cast<int>(threadIdx.x);
  const RowKeys keys = keys_of(p.select, row);
  const int count = min_of(p.counts[row], p.select.k);
  const bool ends = keys.start + keys.count <= next_key;
  if (count > 0 && ends) {
    for (int i = thread; i < p.select.k; i += kThreads) {
      put(p, row, keys, i, i < count ? candidate_of(p, row, keys, i).position : -1);
    }
  }
  const int kept = ends ? 0 : count;
  Candidate own[kEach];
#pragma unroll
  for (int n = 0; n < kEach; ++n) {
    const int i = n * kThreads + thread;
    if (i < kept) own[n] = candidate_of(p, row, keys, i);
  }
  __syncthreads();  // all have read what is written now
#pragma unroll
  for (int n = 0; n < kEach; ++n) {
    const int i = n * kThreads + thread;
    if (i < kept) keep_candidate(p, row, own[n], i, kept);
  }
  if (thread == 0) begin_piece(p, row, keys, next_key, kept);
}

LaunchShape rows_of_shape(const PieceParams& p) { return {static_cast<int>(p.logits.num_rows), kThreads, 0, 0}; }

}  // namespace

void launch_begin(const PieceParams& p, CUstream_st* stream) {
  launch_dependent<&begin_pieces_kernel>("index_topk", rows_of_shape(p), stream, p);
}

void launch_carry(const PieceParams& p, CUstream_st* stream) {
  launch_dependent<&carry_candidates_kernel>("index_topk", rows_of_shape(p), stream, p);
}

}  // namespace attnops::sparse_indexer
