#pragma once
#include "device/common/block_scan.cuh"
#include "device/common/pdl.cuh"
#include "paged_kv/requests.h"

namespace attnops::paged_kv {

// CTA (request, chunk): several CTAs share a request, gridDim.y of them, each taking every so many-th run of kThreads
// cells up to the request's own number of pages: a row stops where its length ends, whatever the table could hold.

// What a kernel asks of its requests. Without a report nothing of the checked mode is compiled into it.
template <bool kChecked>
__device__ __forceinline__ Requests requests_of(const Requests& r) {
  Requests own = r;
  if (!kChecked) {
    own.checked = false;
    own.report = nullptr;
  }
  return own;
}

// Some cells of a request, a step apart: the tokens that tell their pages are all asked for before the first is needed.
template <int kThreads, ReportOp kOp>
class Cells {
 public:
  // Of `words`, which has `tokens` tokens in `pages` pages.
  __device__ __forceinline__ Cells(const Requests& r, const RequestWords& words, int tokens, int pages)
      : r_(r), tokens_(tokens), pages_(pages), step_(static_cast<int>(gridDim.y) * kThreads) {
    row_ = pages > 0 ? tokens_of(r, words) : nullptr;
  }

  __device__ __forceinline__ void load(int first) {
#pragma unroll
    for (int i = 0; i < kCells; ++i) {
      const int cell = first + i * step_;
      if (cell < pages_) slots_[i] = row_[position_of(r_, tokens_, cell)];
    }
  }

  // Of cells below `end`, which is no more than there are pages.
  __device__ __forceinline__ void store(int first, int end, int32_t* cells) const {
    if (!r_.checked && r_.slot_map.data == nullptr && r_.page_shift >= 0) {  // what page_of_slot says then
#pragma unroll
      for (int i = 0; i < kCells; ++i) {
        const int cell = first + i * step_, slot = slots_[i];
        if (cell < end) cells[cell] = slot < 0 || slot == INT32_MAX ? 0 : slot >> r_.page_shift;
      }
      return;
    }
    const int request = static_cast<int>(blockIdx.x);
    int32_t pages[kCells];
#pragma unroll
    for (int i = 0; i < kCells; ++i) {
      const int cell = first + i * step_;
      if (cell < end) pages[i] = page_of_slot(r_, kOp, request, position_of(r_, tokens_, cell), slots_[i]);
    }
#pragma unroll
    for (int i = 0; i < kCells; ++i) {
      const int cell = first + i * step_;
      if (cell >= end) return;
      cells[cell] = pages[i];
      if (r_.checked) report_order(r_, kOp, request, row_, tokens_, cell, pages[i]);
    }
  }

  __device__ __forceinline__ static int begin() { return static_cast<int>(blockIdx.y * kThreads + threadIdx.x); }
  __device__ __forceinline__ bool any(int first) const { return first < pages_; }
  __device__ __forceinline__ int after(int first) const { return first + kCells * step_; }

 private:
  static constexpr int kCells = 4;

  const Requests& r_;
  const int tokens_, pages_, step_;
  const int32_t* row_;
  int32_t slots_[kCells];
};

template <int kThreads, bool kChecked>
__global__ void __launch_bounds__(kThreads, kChecked ? 1 : 8)
    page_table_kernel(const __grid_constant__ PageTableParams p) {
  const Requests r = requests_of<kChecked>(p.requests);
  const int request = static_cast<int>(blockIdx.x);
  wait_for_earlier_kernels();
  let_next_kernel_start();
  const RequestWords words = words_of(r, request);
  const int tokens = num_tokens(r, words), pages = num_pages(r, tokens);
  if (kChecked && blockIdx.y == 0 && threadIdx.x == 0) report_request(r, ReportOp::kBuildPageTable, request, words);
  Cells<kThreads, ReportOp::kBuildPageTable> cells(r, words, tokens, pages);
  for (int first = cells.begin(); cells.any(first); first = cells.after(first)) {
    cells.load(first);
    cells.store(first, pages, p.page_table + request * p.page_table_stride);
  }
}

// The sum of `value` over all threads; once in a kernel. `narrow`: it is below 2^32.
template <int kThreads>
__device__ __forceinline__ int64_t sum_of_block(int64_t value, bool narrow) {
  constexpr int kWarps = kThreads / 32;
  if (!narrow) {
    int64_t unused;
    return block_exclusive_sum<kThreads>(value, &unused);
  }
  __shared__ unsigned warp_totals[kWarps];
  const int lane = threadIdx.x % 32;
  const unsigned total = __reduce_add_sync(~0u, static_cast<unsigned>(value));
  if (lane == 0) warp_totals[threadIdx.x / 32] = total;
  __syncthreads();
  return __reduce_add_sync(~0u, lane < kWarps ? warp_totals[lane] : 0u);
}

// Every CTA adds up the pages of the requests before its own: lengths are small and stay in L2, and no CTA has to wait
// for another one, so one launch does. What tells of its own request and of the first others is asked for at once.
template <int kThreads, bool kChecked>
__global__ void __launch_bounds__(kThreads, kChecked ? 1 : 8)
    kv_indices_kernel(const __grid_constant__ KvIndicesParams p) {
  const Requests r = requests_of<kChecked>(p.requests);
  const int request = static_cast<int>(blockIdx.x), own = static_cast<int>(threadIdx.x);
  wait_for_earlier_kernels();
  let_next_kernel_start();
  if (r.batch_size == 0) {
    if (own == 0) p.kv_indptr[0] = 0;
    return;
  }
  const RequestWords words = words_of(r, request);
  const RequestWords other = own < request ? words_of(r, own) : RequestWords{-1, 0, 0};
  const int tokens = num_tokens(r, words), pages = num_pages(r, tokens);
  if (blockIdx.y > 0 && static_cast<int>(blockIdx.y) * kThreads >= pages) return;  // the whole CTA
  Cells<kThreads, ReportOp::kBuildKvIndices> cells(r, words, tokens, pages);
  int first = cells.begin();
  cells.load(first);  // before it is known where they go

  int64_t mine = num_pages(r, num_tokens(r, other));
  for (int b = own + kThreads; b < request; b += kThreads) mine += num_pages(r, num_tokens(r, words_of(r, b)));
  const int64_t start = sum_of_block<kThreads>(mine, int64_t{r.batch_size} * r.max_tokens <= UINT32_MAX);

  if (blockIdx.y == 0 && own == 0) {
    if (kChecked) report_request(r, ReportOp::kBuildKvIndices, request, words);
    p.kv_indptr[request] = clamp_to_int32(start);
    if (request == r.batch_size - 1) p.kv_indptr[r.batch_size] = clamp_to_int32(start + pages);
    if (p.kv_last_page_len != nullptr) p.kv_last_page_len[request] = last_page_len(r, tokens);
  }
  const int end = static_cast<int>(max_of<int64_t>(min_of<int64_t>(pages, p.num_indices - start), 0));
  while (cells.any(first)) {
    cells.store(first, end, p.kv_indices + start);
    first = cells.after(first);
    cells.load(first);
  }
}

// One CTA. Each thread adds up a run of neighbouring lengths, and writes their prefix once it knows its own.
template <int kThreads>
__global__ void __launch_bounds__(kThreads) cu_seqlens_kernel(const __grid_constant__ CuSeqlensParams p) {
  wait_for_earlier_kernels();
  let_next_kernel_start();
  const int each = ceil_div(p.batch_size, kThreads);
  const int begin = min_of(static_cast<int>(threadIdx.x) * each, p.batch_size);
  const int end = min_of(begin + each, p.batch_size);
  int64_t sum = 0;
  for (int b = begin; b < end; ++b) sum += max_of(p.seqlens[b], 0);
  int64_t before;
  const int64_t total = block_exclusive_sum<kThreads>(sum, &before);
  for (int b = begin; b < end; ++b) {
    p.cu_seqlens[b] = clamp_to_int32(before);
    before += max_of(p.seqlens[b], 0);
  }
  if (threadIdx.x == 0) p.cu_seqlens[p.batch_size] = clamp_to_int32(total);
}

template <int kThreads>
__global__ void __launch_bounds__(kThreads) translate_kernel(const __grid_constant__ TranslateParams p) {
  wait_for_earlier_kernels();
  let_next_kernel_start();
  const int64_t i = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (i >= p.num_slots) return;
  const int64_t slot = translated(p, i);
  if (p.out_wide) {
    static_cast<int64_t*>(p.out)[i * p.out_stride] = slot;
  } else {
    static_cast<int32_t*>(p.out)[i * p.out_stride] = static_cast<int32_t>(slot);
  }
}

}  // namespace attnops::paged_kv
