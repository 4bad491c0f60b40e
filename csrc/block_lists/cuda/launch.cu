#include "block_lists/cuda/launch.h"
#include "device/common/launch_dependent.cuh"
#include "device/common/pdl.cuh"

namespace attnops::block_lists {
namespace {

constexpr int kThreads = 128, kWarps = kThreads / 32;

// A CTA per row and KV head. 128 entries of a list at a time: those that stand before the tail are put side by side by
// ballots, which keeps their order, and their cells are dealt out to the threads.
__global__ void __launch_bounds__(kThreads) build_kernel(const __grid_constant__ Params p) {
  __shared__ int32_t kept[kThreads];
  __shared__ int in_warp[kWarps];
  wait_for_earlier_kernels();
  let_next_kernel_start();
  const int lane = threadIdx.x, warp = lane / 32;
  const int64_t index = blockIdx.x / p.num_kv_heads;
  const int head = blockIdx.x % p.num_kv_heads;
  const Row row = row_of(p, index);
  const int32_t* const list = p.block_list + row.request * p.list_stride_request + head * p.list_stride_head;
  const int32_t* const pages = p.page_table.row(row.request);
  int32_t* const table = p.tables + index * p.table_stride_row + head * p.table_stride_head;
  const int64_t room = blocks_with_room(p, row);

  bool in_tail = row.whole_tail, in_cut = false;
  int64_t count = 0;
  for (int64_t base = 0; base < p.num_blocks; base += kThreads) {
    const int64_t position = base + lane;
    const int32_t block = position < p.num_blocks ? list[position] : -1;
    const bool keep = stands_before_tail(p, row, head, position, block, in_tail, in_cut);
    const unsigned kept_here = __ballot_sync(~0u, keep);
    if (lane % 32 == 0) in_warp[warp] = __popc(kept_here);
    __syncthreads();
    int before = __popc(kept_here & ((1u << lane % 32) - 1)), all = 0;
    for (int w = 0; w < kWarps; ++w) {
      before += w < warp ? in_warp[w] : 0;
      all += in_warp[w];
    }
    if (keep) kept[before] = block;
    __syncthreads();
    const int writable = static_cast<int>(min_of<int64_t>(all, max_of<int64_t>(room - count, 0)));
    const int cells = writable * static_cast<int>(p.units_per_block);
    for (int i = lane; i < cells; i += kThreads) {
      const int entry = i / static_cast<int>(p.units_per_block);
      const int64_t unit = kept[entry] * p.units_per_block + (i - entry * static_cast<int>(p.units_per_block));
      table[count * p.units_per_block + i] = cell_of(p, pages, row.request, head, unit);
    }
    count += all;
  }

  const int64_t tail = __syncthreads_or(in_tail) ? tail_units(p, row) : 0, whole = min_of(count, room);
  const int64_t cut = p.window_left >= 0 && __syncthreads_or(in_cut) ? cut_units(p, row) : 0;
  const int64_t first = whole * p.units_per_block + cut, fits = first + tail <= p.num_cells ? tail : 0;
  for (int64_t i = lane; i < cut; i += kThreads) {  // there is no window where room may lack
    table[first - cut + i] = cell_of(p, pages, row.request, head, row.first_key + i);
  }
  for (int64_t i = lane; i < fits; i += kThreads) {
    table[first + i] = cell_of(p, pages, row.request, head, tail_unit(p, row) + i);
  }
  if (lane != 0) return;
  report_room(p, row, head, count, tail);
  p.seqlens[index * p.seqlens_stride_row + head * p.seqlens_stride_head] = keys_of(p, row, whole, cut, tail);
}

}  // namespace

void launch(const Params& params, CUstream_st* stream) {
  const int64_t blocks = params.num_rows * params.num_kv_heads;
  if (blocks == 0) return;
  launch_dependent<&build_kernel>("build_block_tables", {static_cast<int>(blocks), kThreads, 0, 0}, stream, params);
}

}  // namespace attnops::block_lists
