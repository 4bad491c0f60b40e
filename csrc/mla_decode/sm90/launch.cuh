#pragma once
#include "device/common/launch.h"
#include "device/sm90/tensor_map.h"
#include "mla_decode/sm90/combine.cuh"
#include "mla_decode/sm90/kernel.cuh"
#include "mla_decode/sm90/launch.h"

namespace attnops::mla_decode::sm90 {

// The copy engine reads a KV tile as one run of a page; every other page size is gathered row by row, and so is
// everything in the checked mode, which must look at each index.
inline bool boxes_fit(const Params& p) {
  return p.report == nullptr && p.page_table.page_size % kPlanTileTokens == 0 && p.page_table.num_pages > 0;
}

inline CUtensorMap make_map(const Params& p) {
  const int64_t element = size_of(p.kv_dtype);
  return attnops::sm90::make_tensor_map({.dtype = p.kv_dtype,
                                         .base = p.kv_pages,
                                         .extents = {kHeadDimQk, static_cast<uint64_t>(p.page_table.page_size),
                                                     static_cast<uint64_t>(p.page_table.num_pages)},
                                         .strides = {static_cast<uint64_t>(p.kv_stride_token * element),
                                                     static_cast<uint64_t>(p.kv_stride_page * element)},
                                         .box_rows = kPlanTileTokens});
}

template <typename T>
void launch_combine(const Params& p, cudaStream_t stream) {
  const int blocks = p.batch_size * blocks_per_request(p.seqlen_q, p.num_q_heads);
  const int rows = min_of(p.seqlen_q * p.num_q_heads, kPlanRows);
  // As wide as the GPU: by rows when there are few, and then by columns.
  constexpr int kManyCtas = 528;
  const int rows_per_block = blocks * rows <= kManyCtas ? 1 : kCombineWarps;
  const bool wide = blocks * rows * 4 <= kManyCtas;
  cudaLaunchAttribute attribute = {};
  attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attribute.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config = {};
  config.gridDim = {static_cast<unsigned>(blocks), static_cast<unsigned>(ceil_div(rows, rows_per_block)),
                    wide ? 4u : 1u};
  config.blockDim = {kCombineWarps * 32, 1, 1};
  config.stream = stream;
  config.attrs = &attribute;
  config.numAttrs = 1;
  const auto kernel = wide ? &mla_combine_kernel<T, 4> : &mla_combine_kernel<T, 1>;
  check_cuda(cudaLaunchKernelEx(&config, kernel, p, rows_per_block, output_aligned(p)), "mla_combine_kernel");
}

template <typename T>
void launch(const Params& p, cudaStream_t stream) {
  if (p.batch_size == 0) return;
  const Modes modes{.use_boxes = boxes_fit(p), .out_aligned = output_aligned(p)};
  const CUtensorMap map = modes.use_boxes ? make_map(p) : CUtensorMap{};
  check_cuda(cudaFuncSetAttribute(&mla_decode_kernel<T>, cudaFuncAttributeMaxDynamicSharedMemorySize, kSharedBytes),
             "shared memory of mla_decode_kernel");
  mla_decode_kernel<T><<<p.num_sm_parts, kThreads, kSharedBytes, stream>>>(p, map, modes);
  check_cuda(cudaGetLastError(), "mla_decode_kernel");
  launch_combine<T>(p, stream);
}

}  // namespace attnops::mla_decode::sm90
