#include "device/common/launch_dependent.cuh"
#include "paged_kv/cuda/launch.h"
#include "paged_kv/cuda/tables.cuh"

namespace attnops::paged_kv {
namespace {

constexpr int kThreads = 256;
constexpr int kBusyBlocks = 1024;  // enough to fill a GPU; more of them only cost their start

// CTAs per request: as the longest row that the shapes allow has work for, but no more than the GPU can use.
int chunks_of(const Requests& r) {
  const int most_pages = num_pages(r, max_of(r.max_tokens, 1));  // page_size may be any
  return min_of(ceil_div(most_pages, kThreads), max_of(kBusyBlocks / max_of(r.batch_size, 1), 1));
}

// CTAs of kThreads without shared memory of their own.
template <auto kKernel, typename... Arguments>
void launch_plain(const char* what, int blocks, CUstream_st* stream, const Arguments&... arguments) {
  launch_dependent<kKernel>(what, {blocks, kThreads, 0, 0}, stream, arguments...);
}

// A CTA for each request and chunk of it.
template <auto kKernel, class Params>
void launch_chunks(const char* what, const Params& p, int requests, CUstream_st* stream) {
  LaunchShape shape{requests, kThreads, 0, 0};
  shape.blocks_y = chunks_of(p.requests);
  launch_dependent<kKernel>(what, shape, stream, p);
}

}  // namespace

void launch(const PageTableParams& p, CUstream_st* stream) {
  const int requests = p.requests.batch_size;
  if (requests == 0) return;  // a grid of zero CTAs is a launch error
  p.requests.report != nullptr
      ? launch_chunks<&page_table_kernel<kThreads, true>>("page_table_kernel", p, requests, stream)
      : launch_chunks<&page_table_kernel<kThreads, false>>("page_table_kernel", p, requests, stream);
}

void launch(const KvIndicesParams& p, CUstream_st* stream) {
  const int requests = max_of(p.requests.batch_size, 1);
  p.requests.report != nullptr
      ? launch_chunks<&kv_indices_kernel<kThreads, true>>("kv_indices_kernel", p, requests, stream)
      : launch_chunks<&kv_indices_kernel<kThreads, false>>("kv_indices_kernel", p, requests, stream);
}

void launch(const CuSeqlensParams& p, CUstream_st* stream) {
  if (p.batch_size <= 1024) {
    launch_dependent<&cu_seqlens_kernel<256>>("cu_seqlens_kernel", {1, 256, 0, 0}, stream, p);
  } else {
    launch_dependent<&cu_seqlens_kernel<1024>>("cu_seqlens_kernel", {1, 1024, 0, 0}, stream, p);
  }
}

void launch(const TranslateParams& p, CUstream_st* stream) {
  if (p.num_slots == 0) return;
  const int blocks = static_cast<int>(ceil_div<int64_t>(p.num_slots, kThreads));
  launch_plain<&translate_kernel<kThreads>>("translate_kernel", blocks, stream, p);
}

}  // namespace attnops::paged_kv
