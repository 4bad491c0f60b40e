#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "core/list_report.h"
#include "core/report.h"
#include "device/common/capability.h"
#include "device/common/launch_dependent.cuh"
#include "device/common/pdl.cuh"
#include "sparse_mla/sm90/convert_rows.h"

// Four kernels, one after the other: zero a byte for each row of the pool, set those of listed rows, number these,
// then convert them and write the lists anew. The third decides whose turn it is, and the fourth does nothing where it
// is the pool's. Numbers depend on the order in which blocks arrive; what is computed from the rows does not.
namespace attnops::sparse_mla {
namespace {

using mla_decode::kFp8RowBytes;
using mla_decode::Params;
using mla_decode::SelectedRows;

constexpr int kThreads = 256, kWarps = kThreads / 32;
constexpr int kBlocksPerSm = 8;     // that are there at once
constexpr int kEntriesPerLane = 8;  // of a list, loaded at once
constexpr int kEntriesPerWarp = 32 * kEntriesPerLane;
constexpr int kRowsAtOnce = 4;  // that a warp converts
constexpr int kConvertBlocksPerSm = 4;
constexpr int kScales = 512, kRope = 528;  // bytes of a row of the pool

// What all kernels know of a call.
struct ConvertParams {
  SelectedRows rows;
  int num_tokens;
  uint8_t* base;  // of scratch, aligned
  ConvertLayout layout;
  int64_t capacity;
  int least_entries;  // of lists for each row
  int32_t* report;
  ReportOp report_op;

  __device__ ConvertCounts* counts() const { return reinterpret_cast<ConvertCounts*>(base + ConvertLayout::kCounts); }
  __device__ uint8_t* flags() const { return base + layout.flags; }
  __device__ ListedRows* listed() const { return reinterpret_cast<ListedRows*>(base + layout.listed); }
  __device__ int32_t* lists() const { return reinterpret_cast<int32_t*>(base + layout.lists); }
  __device__ uint8_t* converted(int64_t row) const { return base + layout.rows + row * kConvertedBytes; }
};

__global__ void __launch_bounds__(kThreads) clear_kernel(const __grid_constant__ ConvertParams p) {
  wait_for_earlier_kernels();
  let_next_kernel_start();
  // Flags follow the counts, and both end at multiples of 256 bytes.
  const int64_t vectors = p.layout.listed / 16, step = int64_t{gridDim.x} * kThreads;
  for (int64_t i = int64_t{blockIdx.x} * kThreads + threadIdx.x; i < vectors; i += step) {
    reinterpret_cast<uint4*>(p.base)[i] = {};
  }
}

// Hands out runs of kEntriesPerWarp entries to warps: run(token, position of this lane's first entry, entries).
template <class Run>
__device__ void for_each_run(const ConvertParams& p, int first_block, const Run& run) {
  const int64_t per_list = ceil_div(p.rows.count, kEntriesPerWarp), runs = per_list * p.num_tokens;
  const int64_t step = int64_t{gridDim.x - first_block} * kWarps;
  for (int64_t i = int64_t{blockIdx.x - first_block} * kWarps + threadIdx.x / 32; i < runs; i += step) {
    const int token = static_cast<int>(i / per_list);
    run(token, static_cast<int>(i - token * per_list) * kEntriesPerWarp + static_cast<int>(threadIdx.x) % 32);
  }
}

// A lane's entries; -1 behind the list's length.
__device__ void load_entries(const ConvertParams& p, int token, int first, int (&index)[kEntriesPerLane]) {
  const int end = p.rows.length(token);
  const int32_t* list = p.rows.indices + token * p.rows.stride_list;
#pragma unroll
  for (int j = 0; j < kEntriesPerLane; ++j) index[j] = first + 32 * j < end ? list[first + 32 * j] : -1;
}

__global__ void __launch_bounds__(kThreads) mark_kernel(const __grid_constant__ ConvertParams p) {
  wait_for_earlier_kernels();
  let_next_kernel_start();
  uint8_t* const flags = p.flags();
  uint32_t found = 0;
  for_each_run(p, 0, [&](int token, int first) {
    int index[kEntriesPerLane];
    load_entries(p, token, first, index);
#pragma unroll
    for (int j = 0; j < kEntriesPerLane; ++j) {
      if (!p.rows.has_row(index[j])) continue;
      ++found;
      // Most are set already. One that another SM has set may look as if it were not: it is set once more.
      if (flags[index[j]] == 0) flags[index[j]] = 1;
    }
  });
  __shared__ unsigned long long sum;
  if (threadIdx.x == 0) sum = 0;
  __syncthreads();
  found = __reduce_add_sync(~0u, found);
  if (threadIdx.x % 32 == 0 && found > 0) atomicAdd(&sum, static_cast<unsigned long long>(found));
  __syncthreads();
  if (threadIdx.x == 0 && sum > 0) atomicAdd(&p.counts()->listed, sum);
}

// Bits of four bytes that are 0 or 1.
__device__ uint32_t bits_of(uint32_t bytes) { return bytes * 0x10204080u >> 28; }

__global__ void __launch_bounds__(kThreads) number_kernel(const __grid_constant__ ConvertParams p) {
  wait_for_earlier_kernels();
  let_next_kernel_start();
  const int64_t word = int64_t{blockIdx.x} * kThreads + threadIdx.x;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  uint32_t bits = 0;
  if (word < p.layout.words) {
    const uint4* flags = reinterpret_cast<const uint4*>(p.flags() + word * kRowsPerWord);
    const uint4 low = flags[0], high = flags[1];
    bits = bits_of(low.x) | bits_of(low.y) << 4 | bits_of(low.z) << 8 | bits_of(low.w) << 12 | bits_of(high.x) << 16 |
           bits_of(high.y) << 20 | bits_of(high.z) << 24 | bits_of(high.w) << 28;
  }
  const uint32_t own = __popc(bits);
  uint32_t before = own;
#pragma unroll
  for (int step = 1; step < 32; step *= 2) {
    const uint32_t other = __shfl_up_sync(~0u, before, step);
    if (lane >= step) before += other;
  }
  __shared__ uint32_t sums[kWarps], base;
  if (lane == 31) sums[warp] = before;
  __syncthreads();
  uint32_t total = 0;
  before -= own;
#pragma unroll
  for (int w = 0; w < kWarps; ++w) {
    if (w < warp) before += sums[w];
    total += sums[w];
  }
  ConvertCounts* const counts = p.counts();
  if (threadIdx.x == 0) base = total > 0 ? atomicAdd(&counts->rows, total) : 0;
  __syncthreads();
  if (word < p.layout.words) p.listed()[word] = {bits, base + before};
  if (threadIdx.x != 0) return;
  __threadfence();
  if (atomicAdd(&counts->blocks_done, 1u) + 1 != gridDim.x) return;
  __threadfence();
  const uint32_t rows = atomicAdd(&counts->rows, 0u);
  const bool fits = rows <= p.capacity;
  counts->turn = fits && counts->listed >= static_cast<unsigned long long>(p.least_entries) * rows && rows > 0;
}

struct RowPart {
  uint4 codes;  // 16 columns
  float scale;  // theirs
  uint4 rope;   // 8 columns, of lanes 0 to 7
};

__device__ RowPart load_row(const ConvertParams& p, int row) {
  const int lane = threadIdx.x % 32;
  const uint8_t* from = static_cast<const uint8_t*>(p.rows.pages) + p.rows.offset(row);
  RowPart part;
  part.codes = *reinterpret_cast<const uint4*>(from + 16 * lane);
  part.scale = *reinterpret_cast<const float*>(from + kScales + lane / 8 * 4);
  part.rope = lane < 8 ? *reinterpret_cast<const uint4*>(from + kRope + 16 * lane) : uint4{};
  return part;
}

// Two e4m3 as bf16.
__device__ uint32_t scaled(uint16_t codes, float scale) {
  uint32_t halves;
  asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(halves) : "h"(codes));
  const float2 values = __half22float2(*reinterpret_cast<const __half2*>(&halves));
  const __nv_bfloat162 rounded = __floats2bfloat162_rn(values.x * scale, values.y * scale);
  return *reinterpret_cast<const uint32_t*>(&rounded);
}

__device__ void store_row(const ConvertParams& p, const RowPart& part, int64_t number) {
  const int lane = threadIdx.x % 32;
  const uint32_t codes[4] = {part.codes.x, part.codes.y, part.codes.z, part.codes.w};
  uint32_t out[8];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    out[2 * i] = scaled(static_cast<uint16_t>(codes[i]), part.scale);
    out[2 * i + 1] = scaled(static_cast<uint16_t>(codes[i] >> 16), part.scale);
  }
  uint8_t* const to = p.converted(number);
  reinterpret_cast<uint4*>(to)[2 * lane] = {out[0], out[1], out[2], out[3]};
  reinterpret_cast<uint4*>(to)[2 * lane + 1] = {out[4], out[5], out[6], out[7]};
  if (lane < 8) reinterpret_cast<uint4*>(to + 1024)[lane] = part.rope;
}

// The listed rows of one word, by a warp.
__device__ void convert_word(const ConvertParams& p, int64_t word, ListedRows listed) {
  const int base = static_cast<int>(word * kRowsPerWord);
  int64_t number = listed.first;
  while (listed.bits != 0) {
    RowPart parts[kRowsAtOnce];
    const int count = min_of(__popc(listed.bits), kRowsAtOnce);
#pragma unroll
    for (int i = 0; i < kRowsAtOnce; ++i) {
      if (i < count) parts[i] = load_row(p, base + __ffs(static_cast<int>(listed.bits)) - 1);
      listed.bits &= listed.bits - 1;
    }
#pragma unroll
    for (int i = 0; i < kRowsAtOnce; ++i) {
      if (i < count) store_row(p, parts[i], number + i);
    }
    number += count;
  }
}

// Warps look at `words_per_step` words at once, one a lane: few where rows lie close, many in a large pool of which
// little is listed.
__device__ void convert_rows(const ConvertParams& p, int blocks, int words_per_step) {
  const int lane = threadIdx.x % 32;
  const int64_t step = int64_t{blocks} * kWarps * words_per_step;
  for (int64_t first = (int64_t{blockIdx.x} * kWarps + threadIdx.x / 32) * words_per_step; first < p.layout.words;
       first += step) {
    const int64_t word = first + lane;
    ListedRows own{};
    if (lane < words_per_step && word < p.layout.words) own = p.listed()[word];
    uint32_t lanes = __ballot_sync(~0u, own.bits != 0);
    while (lanes != 0) {
      const int from = __ffs(static_cast<int>(lanes)) - 1;
      lanes &= lanes - 1;
      const ListedRows listed{__shfl_sync(~0u, own.bits, from), __shfl_sync(~0u, own.first, from)};
      convert_word(p, first + from, listed);
    }
  }
}

__device__ void write_lists(const ConvertParams& p, int first_block) {
  for_each_run(p, first_block, [&](int token, int first) {
    int index[kEntriesPerLane];
    load_entries(p, token, first, index);
    int32_t* const list = p.lists() + int64_t{token} * p.rows.count;
#pragma unroll
    for (int j = 0; j < kEntriesPerLane; ++j) {
      const int position = first + 32 * j;
      int number = -1;
      if (p.rows.has_row(index[j])) {
        const ListedRows listed = p.listed()[index[j] / kRowsPerWord];
        number = static_cast<int>(listed.first + __popc(listed.bits & ((1u << index[j] % kRowsPerWord) - 1)));
      } else if (index[j] >= 0 && p.report != nullptr) {
        record_fault(p.report, {p.report_op, kReportRowIndex, token, position, index[j], p.rows.num_rows});
      }
      if (position < p.rows.count) list[position] = number;
    }
  });
}

__global__ void __launch_bounds__(kThreads)
    convert_kernel(const __grid_constant__ ConvertParams p, const __grid_constant__ int convert_blocks,
                   const __grid_constant__ int words_per_step) {
  wait_for_earlier_kernels();
  let_next_kernel_start();
  if (p.counts()->turn == 0) return;
  if (static_cast<int>(blockIdx.x) < convert_blocks) {
    convert_rows(p, convert_blocks, words_per_step);
  } else {
    write_lists(p, convert_blocks);
  }
}

int blocks_for(int64_t threads, int most) {
  return static_cast<int>(max_of(min_of(ceil_div(threads, int64_t{kThreads}), int64_t{most}), int64_t{1}));
}

}  // namespace

ConvertedCall launch_convert_rows(const Params& p, uint8_t* scratch, int64_t bytes, CUstream_st* stream) {
  const ConvertLayout layout(p.selected.num_rows, p.batch_size, p.selected.count);
  const auto address = reinterpret_cast<uintptr_t>(scratch);
  uint8_t* const base = scratch + (round_up(address, uintptr_t{ConvertLayout::kAlignment}) - address);
  ConvertParams c{.rows = p.selected,
                  .num_tokens = p.batch_size,
                  .base = base,
                  .layout = layout,
                  .capacity = min_of(layout.capacity(bytes), kMostListable - 1),
                  .least_entries = least_entries_per_row(p.num_q_heads),
                  .report = p.report,
                  .report_op = p.report_op};
  if (c.rows.page_size > 1 && c.rows.stride_page == c.rows.stride_token * c.rows.page_size) {  // no gaps: no division
    c.rows.stride_page = c.rows.stride_token;
    c.rows.page_size = 1;
  }
  const int at_once = kBlocksPerSm * device_sms("sparse_mla_prefill");
  const int64_t runs = int64_t{p.batch_size} * ceil_div(p.selected.count, kEntriesPerWarp);
  const int list_blocks = blocks_for(runs * 32, at_once);
  const auto launch = [&](auto kernel, const char* what, int blocks, auto... more) {
    launch_dependent<kernel.value>(what, {blocks, kThreads, 0, 0}, stream, c, more...);
  };
  launch(std::integral_constant<decltype(&clear_kernel), &clear_kernel>{}, "convert_rows: clear",
         blocks_for(layout.listed / 16, at_once));
  launch(std::integral_constant<decltype(&mark_kernel), &mark_kernel>{}, "convert_rows: mark", list_blocks);
  launch(std::integral_constant<decltype(&number_kernel), &number_kernel>{}, "convert_rows: number",
         static_cast<int>(ceil_div(layout.words, int64_t{kThreads})));
  const int warps = kWarps * kConvertBlocksPerSm * device_sms("sparse_mla_prefill");
  int words_per_step = 1;
  while (words_per_step < 32 && int64_t{2} * words_per_step * warps <= layout.words) words_per_step *= 2;
  const int convert_blocks = blocks_for(ceil_div(layout.words, int64_t{words_per_step}) * 32, warps / kWarps);
  launch(std::integral_constant<decltype(&convert_kernel), &convert_kernel>{}, "convert_rows: convert",
         convert_blocks + list_blocks, convert_blocks, words_per_step);

  ConvertedCall call{.pool = p, .converted = p};
  int32_t* const turn = &reinterpret_cast<ConvertCounts*>(base)->turn;
  call.pool.semaphores = call.converted.semaphores = turn;
  call.pool.num_partials = 0;
  call.converted.num_partials = 1;
  call.converted.kv_dtype = DType::kBFloat16;
  SelectedRows& rows = call.converted.selected;
  rows.pages = base + layout.rows;
  rows.stride_page = kConvertedBytes / 2;
  rows.stride_token = 0;
  rows.page_size = 1;
  rows.num_rows = c.capacity;
  rows.indices = reinterpret_cast<const int32_t*>(base + layout.lists);
  rows.stride_list = p.selected.count;
  return call;
}

}  // namespace attnops::sparse_mla
