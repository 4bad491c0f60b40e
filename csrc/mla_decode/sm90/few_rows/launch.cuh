#pragma once

#include "device/common/launch.h"
#include "device/common/launch_dependent.cuh"
#include "device/sm90/tensor_map.h"
#include "mla_decode/sm90/few_rows/finish.cuh"
#include "mla_decode/sm90/few_rows/kernel.cuh"
#include "mla_decode/sm90/few_rows/launch.h"
#include "mla_decode/sm90/few_rows/merge.cuh"
#include "mla_decode/sm90/launch.cuh"

namespace attnops::mla_decode::sm90::few_rows {

// The copy engine reads groups of eight tokens; pages that do not hold whole groups are gathered row by row, and so is
// everything in the checked mode, which must look at each index.
inline bool groups_fit(const Params& p) {
  return p.report == nullptr && p.page_table.page_size % kGroupTokens == 0 && p.page_table.num_pages > 0;
}

inline CUtensorMap make_map(const Params& p) {
  const int64_t element = size_of(p.kv_dtype);
  return attnops::sm90::make_row_map({.dtype = p.kv_dtype,
                                      .base = p.kv_pages,
                                      .extents = {kHeadDimQk, static_cast<uint64_t>(p.page_table.page_size),
                                                  static_cast<uint64_t>(p.page_table.num_pages)},
                                      .strides = {static_cast<uint64_t>(p.kv_stride_token * element),
                                                  static_cast<uint64_t>(p.kv_stride_page * element)},
                                      .box_rows = kGroupTokens});
}

// Partial results as rows.
template <typename T>
void launch_merge(const Params& p, cudaStream_t stream) {
  // As wide as the GPU.
  constexpr int kFewRows = 128, kManyRows = 528;
  const int rows = p.seqlen_q * p.num_q_heads, all_rows = p.batch_size * rows;
  const bool aligned =
      rows_aligned(p.out, size_of(p.dtype), 8, p.out_stride_request, p.out_stride_token, p.out_stride_head);
  if (p.fixed_split_tokens == 0) {
    constexpr int kShares = 2;  // of a part: as many CTAs as run at a time
    launch_dependent<&mla_merge_shared_rows_kernel<T>>(
        "mla_merge_shared_rows_kernel", {p.num_sm_parts, kMergeThreads, 0, 0, kShares}, stream, p, aligned);
    return;
  }
  // By rows and columns when there are few, else by rows alone.
  const int rows_per_block = all_rows <= kManyRows ? 1 : kMergeWarps;
  LaunchShape shape{p.batch_size, kMergeThreads, 0, 0, ceil_div(rows, rows_per_block)};
  if (all_rows <= kFewRows) {
    shape.blocks_z = 8;
    launch_dependent<&mla_merge_kernel<T, true>>("mla_merge_kernel", shape, stream, p, rows_per_block, aligned);
  } else {
    launch_dependent<&mla_merge_kernel<T, false>>("mla_merge_kernel", shape, stream, p, rows_per_block, aligned);
  }
}

// Of short calls (Params::list_cuts), `works` of them.
template <typename T>
void launch_short_merge(const Params& p, int works, cudaStream_t stream) {
  // Of few rows each 64 columns have a CTA, up to as many as a GPU holds at once. Else a CTA has as many rows as its
  // warps take at a time: fewer would come in rounds.
  constexpr int kFewRows = 32;
  const int rows = works * kShortRows, rows_per_block = rows <= kFewRows ? 1 : kMergeWarps / merging_warps(p.list_cuts);
  const bool aligned = rows_aligned(p.out, size_of(p.dtype), 8, p.out_stride_request, p.out_stride_head);
  LaunchShape shape{works, kMergeThreads, 0, 0, kShortRows / rows_per_block};
  if (rows <= kFewRows) {
    shape.blocks_z = 8;
    launch_dependent<&mla_merge_short_kernel<T, true>>("mla_merge_short_kernel", shape, stream, p, rows_per_block,
                                                       aligned);
  } else {
    launch_dependent<&mla_merge_short_kernel<T, false>>("mla_merge_short_kernel", shape, stream, p, rows_per_block,
                                                        aligned);
  }
}

// Batch-invariant mode: balanced plans are merged by the parts themselves.
template <typename T, class At>
void launch_merge_cuts(const Params& p, cudaStream_t stream) {
  constexpr int kCtas = 264;  // in all, or more where there are more requests
  const int per_request = min_of(ceil_div(kCtas, p.batch_size), MergeShape<At>::kBlocks);
  launch_dependent<&mla_merge_cuts_kernel<T, At>>("mla_merge_cuts_kernel",
                                                  {p.batch_size, kConsumerThreads, 0, 0, per_request}, stream, p);
}

template <typename T, class At>
void launch_shape(const Params& p, cudaStream_t stream) {
  const CallModes modes{
      .use_boxes = !At::kSelects && groups_fit(p),
      .by_page_size = Divisor(At::kSelects ? p.selected.page_size : p.page_table.page_size),
      .paired = p.num_sm_parts % 2 == 0 && p.fixed_split_tokens == 0 && p.tile_scheduler_metadata != nullptr,
      .by_extra_size = At::kSelects ? Divisor(p.extra.page_size) : Divisor()};
  const CUtensorMap map = modes.use_boxes ? make_map(p) : CUtensorMap{};
  constexpr int kBytes = At::kBytes;
  LaunchShape shape{p.num_sm_parts, kThreads, kBytes, kBytes};
  shape.cluster = modes.paired ? 2 : 1;
  launch_dependent<&mla_decode_few_kernel<T, At>>("mla_decode_few_kernel", shape, stream, p, map, modes);
  if (p.fixed_split_tokens > 0) launch_merge_cuts<T, At>(p, stream);
}

template <typename T>
void launch(const Params& p, cudaStream_t stream) {
  if (p.batch_size == 0) return;
  const int rows = p.seqlen_q * p.num_q_heads;
  if (rows <= 16) return launch_shape<T, Shape<16>>(p, stream);
  launch_shape<T, Shape<32>>(p, stream);
}

// Lists of rows of 16 bits.
template <typename T>
void launch_selected(const Params& given, cudaStream_t stream) {
  if (given.batch_size == 0) return;
  const Params p = as_page_table(given);
  if (p.num_q_heads <= 16) return launch_shape<T, Shape<16, Options::kSelected>>(p, stream);
  launch_shape<T, Shape<32, Options::kSelected>>(p, stream);
}

}  // namespace attnops::mla_decode::sm90::few_rows
