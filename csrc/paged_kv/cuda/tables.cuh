#pragma once
#include "device/common/block_scan.cuh"
#include "device/common/pdl.cuh"
#include "paged_kv/requests.h"

namespace attnops::paged_kv {

// Several CTAs share a request, `chunks` of them, each taking every chunks-th run of kThreads cells up to the request's
// own number of pages: a row stops where its length ends, whatever the table could hold.
struct Share {
  int request, chunk;
};

__device__ inline Share share_of(int chunks) {
  return {static_cast<int>(blockIdx.x / chunks), static_cast<int>(blockIdx.x % chunks)};
}

// Some cells of a request, `step` apart: the tokens that tell their pages are all asked for before the first is needed.
class Cells {
 public:
  __device__ Cells(const Requests& r, ReportOp op, int request, int tokens, int pages, int step)
      : r_(r), op_(op), request_(request), tokens_(tokens), pages_(pages), step_(step) {
    if (pages > 0) row_ = tokens_of(r, request);
  }

  __device__ void load(int first) {
#pragma unroll
    for (int i = 0; i < kCells; ++i) {
      const int cell = first + i * step_;
      if (cell < pages_) slots_[i] = row_[position_of(r_, tokens_, cell)];
    }
  }

  __device__ void store(int first, int64_t end, int32_t* cells) const {
#pragma unroll
    for (int i = 0; i < kCells; ++i) {
      const int cell = first + i * step_;
      if (cell >= pages_ || cell >= end) return;
      cells[cell] = page_of_slot(r_, op_, request_, position_of(r_, tokens_, cell), slots_[i]);
      if (r_.checked) report_order(r_, op_, request_, row_, tokens_, cell, cells[cell]);
    }
  }

  __device__ bool any(int first) const { return first < pages_; }
  __device__ int after(int first) const { return first + kCells * step_; }

 private:
  static constexpr int kCells = 4;

  const Requests& r_;
  const ReportOp op_;
  const int request_, tokens_, pages_, step_;
  const int32_t* row_ = nullptr;
  int32_t slots_[kCells];
};

template <int kThreads>
__global__ void __launch_bounds__(kThreads) page_table_kernel(const __grid_constant__ PageTableParams p, int chunks) {
  const Requests& r = p.requests;
  const auto [request, chunk] = share_of(chunks);
  wait_for_earlier_kernels();
  let_next_kernel_start();
  if (r.report != nullptr && chunk == 0 && threadIdx.x == 0) report_request(r, ReportOp::kBuildPageTable, request);
  const int tokens = num_tokens(r, request);
  const int pages = num_pages(r, tokens);
  Cells cells(r, ReportOp::kBuildPageTable, request, tokens, pages, chunks * kThreads);
  for (int first = chunk * kThreads + threadIdx.x; cells.any(first); first = cells.after(first)) {
    cells.load(first);
    cells.store(first, pages, p.page_table + request * p.page_table_stride);
  }
}

// Every CTA adds up the pages of the requests before its own: lengths are small and stay in L2, and no CTA has to wait
// for another one, so one launch does.
template <int kThreads>
__global__ void __launch_bounds__(kThreads) kv_indices_kernel(const __grid_constant__ KvIndicesParams p, int chunks) {
  const Requests& r = p.requests;
  wait_for_earlier_kernels();
  let_next_kernel_start();
  if (r.batch_size == 0) {
    if (threadIdx.x == 0) p.kv_indptr[0] = 0;
    return;
  }
  const auto [request, chunk] = share_of(chunks);
  const int tokens = num_tokens(r, request);
  const int pages = num_pages(r, tokens);
  if (chunk > 0 && chunk * kThreads >= pages) return;  // the whole CTA
  Cells cells(r, ReportOp::kBuildKvIndices, request, tokens, pages, chunks * kThreads);
  int first = chunk * kThreads + threadIdx.x;
  cells.load(first);  // before it is known where they go

  int64_t mine = 0;
  for (int b = threadIdx.x; b < request; b += kThreads) mine += num_pages(r, num_tokens(r, b));
  int64_t unused;
  const int64_t start = block_exclusive_sum<kThreads>(mine, &unused);

  if (chunk == 0 && threadIdx.x == 0) {
    if (r.report != nullptr) report_request(r, ReportOp::kBuildKvIndices, request);
    p.kv_indptr[request] = clamp_to_int32(start);
    if (request == r.batch_size - 1) p.kv_indptr[r.batch_size] = clamp_to_int32(start + pages);
    if (p.kv_last_page_len != nullptr) p.kv_last_page_len[request] = last_page_len(r, tokens);
  }
  while (cells.any(first)) {
    cells.store(first, p.num_indices - start, p.kv_indices + start);
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
