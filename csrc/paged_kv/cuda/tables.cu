#include "device/common/launch.h"
#include "paged_kv/cuda/launch.h"
#include "paged_kv/cuda/tables.cuh"

namespace attnops::paged_kv {
namespace {

constexpr int kThreads = 256;
constexpr int kBusyBlocks = 1024;  // enough to fill a GPU; more of them only cost their start

// CTAs per request: as the longest row that the shapes allow has work for, but no more than the GPU can use.
int chunks_of(const Requests& r) {
  const int most_pages = ceil_div(max_of(r.max_tokens, 1), r.page_size);
  return min_of(ceil_div(most_pages, kThreads), max_of(kBusyBlocks / max_of(r.batch_size, 1), 1));
}

}  // namespace

void launch(const PageTableParams& p, CUstream_st* stream) {
  const int chunks = chunks_of(p.requests);
  if (p.requests.batch_size == 0) return;  // a grid of zero CTAs is a launch error
  page_table_kernel<kThreads><<<p.requests.batch_size * chunks, kThreads, 0, stream>>>(p, chunks);
  check_cuda(cudaGetLastError(), "page_table_kernel");
}

void launch(const KvIndicesParams& p, CUstream_st* stream) {
  const int chunks = chunks_of(p.requests);
  kv_indices_kernel<kThreads><<<max_of(p.requests.batch_size, 1) * chunks, kThreads, 0, stream>>>(p, chunks);
  check_cuda(cudaGetLastError(), "kv_indices_kernel");
}

void launch(const CuSeqlensParams& p, CUstream_st* stream) {
  if (p.batch_size <= 1024) {
    cu_seqlens_kernel<256><<<1, 256, 0, stream>>>(p);
  } else {
    cu_seqlens_kernel<1024><<<1, 1024, 0, stream>>>(p);
  }
  check_cuda(cudaGetLastError(), "cu_seqlens_kernel");
}

void launch(const TranslateParams& p, CUstream_st* stream) {
  if (p.num_slots == 0) return;
  const auto blocks = static_cast<unsigned>(ceil_div<int64_t>(p.num_slots, kThreads));
  translate_kernel<kThreads><<<blocks, kThreads, 0, stream>>>(p);
  check_cuda(cudaGetLastError(), "translate_kernel");
}

}  // namespace attnops::paged_kv
