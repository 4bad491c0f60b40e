#include "device/common/block_scan.cuh"
#include "device/common/launch_dependent.cuh"
#include "device/common/pdl.cuh"
#include "device/common/vec.h"
#include "speculation/cuda/launch.h"

namespace attnops::speculation {
namespace {

// ---- move_kv, copy_page_tail

constexpr int kMoveThreads = 128;
constexpr int kBatch = 8;  // rows that are in flight in one thread: all are loaded before one is stored

// A CTA per (request, buffer, piece of a row and group of moves). A thread owns the same bytes of all rows, so nothing
// has to wait for another thread, whichever rows overlap.
template <typename Bytes, class Moves>
__global__ void __launch_bounds__(kMoveThreads)
    move_rows_kernel(const __grid_constant__ Moves moves, const __grid_constant__ Buffers buffers, int pieces,
                     bool first) {
  __shared__ int64_t from[kBatch], to[kBatch];
  wait_for_earlier_kernels();
  let_next_kernel_start();
  const int b = blockIdx.x, buffer = blockIdx.y, group = blockIdx.z / pieces;
  int piece = blockIdx.z % pieces;
  const int64_t count = moves.count(b, group);
  if (first && buffer == 0 && piece == 0) {
    if (group == 0 && threadIdx.x == 0) moves.begin(b);
    for (int64_t i = threadIdx.x; i < count; i += kMoveThreads) moves.finish(buffers, b, group, i);
  }
  if (buffers.count == 0) return;
  const Rows& rows = buffers.rows[buffer];
  const int per_head = rows.head_bytes / static_cast<int>(sizeof(Bytes));
  for (; piece * kMoveThreads < rows.heads * per_head; piece += pieces) {
    const int column = piece * kMoveThreads + threadIdx.x, head = column / per_head;
    char* mine = rows.pages + head * rows.stride_head +
                 static_cast<int64_t>(column - head * per_head) * static_cast<int>(sizeof(Bytes));
    for (int64_t begin = 0; begin < count; begin += kBatch) {
      __syncthreads();
      if (threadIdx.x < kBatch) {
        const bool exists = begin + threadIdx.x < count;
        const Pair slots = exists ? moves.pair(b, group, begin + threadIdx.x) : Pair{-1, -1};
        const int64_t source = slot_in(buffers, buffer, slots.from), target = slot_in(buffers, buffer, slots.to);
        const bool copies = source >= 0 && target >= 0 && source != target;
        from[threadIdx.x] = copies ? offset_of(buffers, rows, source) : 0;
        to[threadIdx.x] = copies ? offset_of(buffers, rows, target) : -1;
      }
      __syncthreads();
      if (head >= rows.heads) continue;
      Bytes values[kBatch];
#pragma unroll
      for (int i = 0; i < kBatch; ++i) {
        if (to[i] >= 0) values[i] = *reinterpret_cast<const Bytes*>(mine + from[i]);
      }
#pragma unroll
      for (int i = 0; i < kBatch; ++i) {
        if (to[i] >= 0) *reinterpret_cast<Bytes*>(mine + to[i]) = values[i];
      }
    }
  }
}

bool vectors_fit(const Buffers& buffers, int bytes) {
  for (int i = 0; i < buffers.count; ++i) {
    const Rows& r = buffers.rows[i];
    const int64_t head_stride = r.heads > 1 ? r.stride_head : 0;
    if (r.head_bytes % bytes != 0 || !rows_aligned(r.pages, 1, bytes, r.stride_page, r.stride_token, head_stride)) {
      return false;
    }
  }
  return true;
}

template <typename Bytes, class Moves>
void launch_moves(const Moves& moves, int batch_size, int groups, const Buffers& buffers, bool first,
                  CUstream_st* stream) {
  int64_t widest = 1;
  for (int i = 0; i < buffers.count; ++i) {
    widest = max_of(widest, static_cast<int64_t>(buffers.rows[i].heads) * buffers.rows[i].head_bytes);
  }
  constexpr int64_t kMostPieces = 32;  // a CTA takes several pieces of rows as wide as that
  const int pieces =
      static_cast<int>(min_of(ceil_div<int64_t>(widest, kMoveThreads * static_cast<int>(sizeof(Bytes))), kMostPieces));
  LaunchShape shape{batch_size, kMoveThreads, 0, 0};
  shape.blocks_y = max_of(buffers.count, 1);
  shape.blocks_z = groups * pieces;
  launch_dependent<&move_rows_kernel<Bytes, Moves>>("move_rows", shape, stream, moves, buffers, pieces, first);
}

template <class Moves>
void launch_widest(const Moves& moves, int batch_size, int groups, const Buffers& buffers, bool first,
                   CUstream_st* stream) {
  if (batch_size == 0 || groups == 0) return;
  const auto as = [&](auto bytes) { launch_moves<decltype(bytes)>(moves, batch_size, groups, buffers, first, stream); };
  if (vectors_fit(buffers, 16)) return as(uint4{});
  if (vectors_fit(buffers, 8)) return as(uint2{});
  if (vectors_fit(buffers, 4)) return as(uint32_t{});
  if (vectors_fit(buffers, 2)) return as(uint16_t{});
  as(uint8_t{});
}

// ---- generate_draft_decode_kv_indices

constexpr int kIndexThreads = 256;

// A CTA per (branch of a request, step). Each adds up the keys of the requests before its own: lengths are few, and lie
// in L2.
__global__ void __launch_bounds__(kIndexThreads)
    draft_indices_kernel(const __grid_constant__ DraftIndicesParams p, int topk) {
  const DraftRequests& r = p.requests;
  wait_for_earlier_kernels();
  let_next_kernel_start();
  const int b = blockIdx.x / topk, k = blockIdx.x % topk, step = blockIdx.y;
  int64_t mine = 0, unused;
  for (int other = threadIdx.x; other < b; other += kIndexThreads) mine += num_draft_keys(r, other, step) * topk;
  const int64_t before = block_exclusive_sum<kIndexThreads>(mine, &unused);
  int32_t* indptr = p.kv_indptr + step * p.indptr_stride;
  const int64_t keys = b < r.batch_size ? num_draft_keys(r, b, step) : 0, start = before + k * keys;
  if (threadIdx.x == 0 && blockIdx.x <= static_cast<unsigned>(r.batch_size * topk)) {
    indptr[blockIdx.x] = clamp_to_int32(start);
    if (b < r.batch_size && k == 0 && step == 0 && r.report != nullptr) report_drafts(r, kReportDraftKvIndices, b);
  }
  int32_t* indices = p.kv_indices + step * p.indices_stride + start;
  for (int64_t i = threadIdx.x; i < keys && start + i < p.num_indices; i += kIndexThreads) {
    indices[i] = draft_slot(r, b, k, i);
  }
}

}  // namespace

void launch(const AcceptedMoves& moves, int batch_size, int groups, const Buffers& buffers, bool first,
            CUstream_st* stream) {
  launch_widest(moves, batch_size, groups, buffers, first, stream);
}

void launch(const TailMoves& moves, int batch_size, int groups, const Buffers& buffers, bool first,
            CUstream_st* stream) {
  launch_widest(moves, batch_size, groups, buffers, first, stream);
}

void launch(const DraftIndicesParams& params, CUstream_st* stream) {
  if (params.num_steps == 0) return;
  const int topk = static_cast<int>(params.requests.topk);
  LaunchShape shape{params.requests.batch_size * topk + 1, kIndexThreads, 0, 0};
  shape.blocks_y = static_cast<int>(params.num_steps);
  launch_dependent<&draft_indices_kernel>("draft_kv_indices", shape, stream, params, topk);
}

}  // namespace attnops::speculation
