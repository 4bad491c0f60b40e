#include <type_traits>

#include "block_lists/cuda/launch.h"
#include "device/common/launch_dependent.cuh"
#include "device/common/pdl.cuh"

namespace attnops::block_lists {
namespace {

constexpr int kLoads = 8, kCells = 4;

// A CTA per row and KV head. Each of its warps takes up to 32 * kLoads entries of a list, which are on their way
// together: those that stand before the tail are put side by side by ballots, which keeps their order, and their cells
// are dealt out to the threads, kCells at a time. Nearly all of this runs once, so what is not a load is not unrolled:
// instructions that no SM has seen yet cost more than the loop.
template <int kThreads>
__global__ void __launch_bounds__(kThreads) build_kernel(const __grid_constant__ Params p) {
  constexpr int kWarps = kThreads / 32, kMost = 32 * kLoads;
  __shared__ int32_t entries[kWarps][kMost], kept[kWarps * kMost];
  __shared__ int in_warp[kWarps];
  wait_for_earlier_kernels();
  let_next_kernel_start();
  const int thread = threadIdx.x, warp = thread / 32, lane = thread % 32;
  const int64_t index = blockIdx.x / p.num_kv_heads;
  const int head = blockIdx.x % p.num_kv_heads;
  const int request = request_of(p, index);
  const int32_t* const list = p.block_list + request * p.list_stride_request + head * p.list_stride_head;
  const int share = static_cast<int>(min_of<int64_t>(kMost, 32 * quotient_up(p.num_blocks, kThreads)));
  const int own_first = warp * share + lane;
  int32_t asked_for[kLoads];
  const auto ask_for = [&](int64_t base) {
#pragma unroll
    for (int k = 0; k < kLoads; ++k) {
      const bool there = 32 * k < share && base + own_first + 32 * k < p.num_blocks;
      asked_for[k] = there ? list[base + own_first + 32 * k] : -1;
    }
  };
  ask_for(0);  // before lengths are looked at
  const Row row = row_of(p, index);
  const int32_t* const pages = p.page_table.row(request);
  int32_t* const table = p.tables + index * p.table_stride_row + head * p.table_stride_head;
  const int64_t room = blocks_with_room(p, row);

  bool in_tail = row.whole_tail, in_cut = false;
  int64_t count = 0;
  for (int64_t base = 0; base < p.num_blocks; base += kWarps * share) {
#pragma unroll
    for (int k = 0; k < kLoads; ++k) entries[warp][lane + 32 * k] = asked_for[k];
    ask_for(base + kWarps * share);
    int own = 0;
#pragma unroll 1
    for (int k = 0; k < share; k += 32) {
      const int32_t block = entries[warp][lane + k];
      const bool keep = stands_before_tail(p, row, head, base + own_first + k, block, in_tail, in_cut);
      const unsigned kept_here = __ballot_sync(~0u, keep);
      __syncwarp();  // all have read: what is kept may take the place of others
      if (keep) entries[warp][own + __popc(kept_here & ((1u << lane) - 1))] = block;
      own += __popc(kept_here);
    }
    if (lane == 0) in_warp[warp] = own;
    __syncthreads();
    int before = 0, all = 0;
#pragma unroll 1
    for (int w = 0; w < kWarps; ++w) {
      before += w < warp ? in_warp[w] : 0;
      all += in_warp[w];
    }
#pragma unroll 1
    for (int i = lane; i < own; i += 32) kept[before + i] = entries[warp][i];
    __syncthreads();
    const int writable = static_cast<int>(min_of<int64_t>(all, max_of<int64_t>(room - count, 0)));
    const int units = static_cast<int>(p.units_per_block), cells = writable * units;
    int32_t* const out = table + count * units;
#pragma unroll 1
    for (int begin = thread; begin < cells; begin += kCells * kThreads) {
      int64_t unit[kCells];
      int32_t page[kCells];
#pragma unroll
      for (int c = 0; c < kCells; ++c) {
        const int i = min_of(begin + c * kThreads, cells - 1);
        const int entry = static_cast<unsigned>(i) / static_cast<unsigned>(units);
        unit[c] = static_cast<int64_t>(kept[entry]) * units + (i - entry * units);
        page[c] = pages[page_of_unit(p, unit[c])];
      }
#pragma unroll
      for (int c = 0; c < kCells; ++c) {
        const int i = begin + c * kThreads;
        if (i < cells) out[i] = cell_in(p, page[c], head, unit[c]);
      }
      if (p.report == nullptr) continue;
#pragma unroll 1
      for (int i = begin; i < min_of(begin + kCells * kThreads, cells); i += kThreads) {
        const int64_t unit_of = static_cast<int64_t>(kept[i / units]) * units + i % units;
        report_page(p, pages[page_of_unit(p, unit_of)], request, unit_of);
      }
    }
    count += all;
  }

  const int64_t tail = __syncthreads_or(in_tail) ? tail_units(p, row) : 0, whole = min_of(count, room);
  const int64_t cut = p.window_left >= 0 && __syncthreads_or(in_cut) ? cut_units(p, row) : 0;
  const int64_t first = whole * p.units_per_block + cut, fits = first + tail <= p.num_cells ? tail : 0;
  for (int64_t i = thread; i < cut; i += kThreads) {  // there is no window where room may lack
    table[first - cut + i] = cell_of(p, pages, request, head, row.first_key + i);
  }
  for (int64_t i = thread; i < fits; i += kThreads) {
    table[first + i] = cell_of(p, pages, request, head, tail_unit(p, row) + i);
  }
  if (thread != 0) return;
  report_room(p, row, head, count, tail);
  p.seqlens[index * p.seqlens_stride_row + head * p.seqlens_stride_head] = keys_of(p, row, whole, cut, tail);
}

}  // namespace

void launch(const Params& params, CUstream_st* stream) {
  const int64_t blocks = params.num_rows * params.num_kv_heads;
  if (blocks == 0) return;
  const auto run = [&](auto threads) {
    constexpr int kThreads = decltype(threads)::value;
    launch_dependent<&build_kernel<kThreads>>("build_block_tables", {static_cast<int>(blocks), kThreads, 0, 0}, stream,
                                              params);
  };
  // What a thread has to do in turns: entries of a list, or cells.
  if (max_of(params.num_blocks, params.num_cells) > 128 * kCells) {
    run(std::integral_constant<int, 256>{});
  } else {
    run(std::integral_constant<int, 128>{});
  }
}

}  // namespace attnops::block_lists
