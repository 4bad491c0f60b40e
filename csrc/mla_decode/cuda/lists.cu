#include "device/common/arch.h"
#include "device/common/launch_dependent.cuh"
#include "mla_decode/cuda/lists.h"
#include "mla_decode/sm90/combine.cuh"
// Splits come first.
#include "mla_decode/cuda/lists.cuh"

namespace attnops::mla_decode {
namespace {

template <typename T, int kTiles>
void launch_tiles(const Params& p, cudaStream_t stream) {
  constexpr int kBytes = lists::Layout<kTiles>::kBytes;
  launch_dependent<&lists::mla_lists_kernel<T, kTiles>>("mla_lists_kernel",
                                                        {p.num_sm_parts, lists::kThreads, kBytes, kBytes}, stream, p);
}

template <typename T>
void launch_lists(Params p, cudaStream_t stream) {
  if (p.batch_size == 0) return;
  const bool planned = p.tile_scheduler_metadata != nullptr;
  if (!planned) p.num_sm_parts = device_sms("sparse_mla_prefill");
  p.division = work_division(1, p.num_q_heads, p.num_sm_parts);
  // The walk looks for keys in a page table as well: one that holds them all.
  p.page_table = {.cells = nullptr,
                  .kv_indptr = nullptr,
                  .stride_request = 0,
                  .num_pages = 1,
                  .page_size = 1,
                  .max_pages = PageTable::kMostTokens,
                  .num_indices = 0};
  if (p.num_q_heads <= 16) {
    launch_tiles<T, 1>(p, stream);
  } else {
    launch_tiles<T, 4>(p, stream);
  }
  if (!planned) return;
  const int groups = ceil_div(p.num_q_heads, lists::kWarps);
  launch_dependent<&lists::mla_lists_merge_kernel<T>>("mla_lists_merge_kernel",
                                                      {p.batch_size, lists::kThreads, 0, 0, groups}, stream, p);
}

}  // namespace

void launch_lists_bf16(const Params& p, CUstream_st* stream) { launch_lists<__nv_bfloat16>(p, stream); }
void launch_lists_fp16(const Params& p, CUstream_st* stream) { launch_lists<__half>(p, stream); }

int lists_shared_bytes(int num_q_heads) {
  return num_q_heads <= 16 ? lists::Layout<1>::kBytes : lists::Layout<4>::kBytes;
}

}  // namespace attnops::mla_decode
