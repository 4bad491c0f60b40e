#include "device/common/block_scan.cuh"
#include "device/common/launch_dependent.cuh"
#include "device/common/pdl.cuh"
#include "xqa_decode/cuda/chunks.h"

namespace attnops::xqa_decode {
namespace {

// One CTA: a thread for each request, whose first chunk is the sum of those before. Sums of hostile counts have 31
// bits: at most kThreads times one more than there is room for.
template <int kThreads>
__global__ void __launch_bounds__(kThreads) xqa_decode_chunks_kernel(const __grid_constant__ ChunkParams p) {
  static_assert(kThreads * (kMostChunks + int64_t{1}) < INT32_MAX);
  wait_for_earlier_kernels();
  let_next_kernel_start();
  int before = 0;  // chunks of earlier requests
  for (int base = 0; base < p.num_requests; base += kThreads) {
    const int request = base + static_cast<int>(threadIdx.x);
    int begin = 0, end = 0, length = 0;
    if (request < p.num_requests) {
      begin = p.cu_seqlens_q[request], end = p.cu_seqlens_q[request + 1], length = p.cache_seqlens[request];
    }
    const int64_t queries = min_of<int64_t>(max_of<int64_t>(int64_t{end} - begin, 0), INT32_MAX);
    const int own = num_chunks(static_cast<int>(queries), p.chunk_tokens, p.max_chunks + 1);
    int first;
    const int all = block_exclusive_sum<kThreads>(own, &first);
    first += before;
    for (int i = 0; i < own && first + i <= p.max_chunks; ++i)
      write_chunk(p, request, begin, end, length, first + i, i);
    before = min_of(before + all, p.max_chunks + 1);
  }
  for (int at = before + static_cast<int>(threadIdx.x); at <= p.max_chunks; at += kThreads) write_no_chunk(p, at);
}

}  // namespace

void launch_chunks(const ChunkParams& params, CUstream_st* stream) {
  constexpr int kThreads = 256;
  launch_dependent<&xqa_decode_chunks_kernel<kThreads>>("xqa_decode_chunks", {1, kThreads, 0, 0}, stream, params);
}

}  // namespace attnops::xqa_decode
