#pragma once
#include "device/common/launch.h"
#include "device/common/launch_dependent.cuh"
#include "device/sm90/tensor_map.h"
#include "mla_decode/sm90/kernel.cuh"
#include "mla_decode/sm90/launch.h"
#include "mla_decode/sm90/limits.h"
#include "mla_decode/sm90/merge_units.cuh"
#include "mla_decode/sm90/ring/launch.h"
#include "mla_decode/sm90/selected.h"

namespace attnops::mla_decode::sm90 {

// Rows that the copy engine reads at once: those of a tile, or of a page that is half of one. Smaller boxes take it
// longer than gathering. 0: everything is gathered.
inline int rows_of_box(const Params& p) {
  if (boxes_fit(p)) return kPlanTileTokens;
  const bool fits = p.page_table.page_size == kPlanTileTokens / 2;
  return fits && p.report == nullptr && p.page_table.num_pages > 0 ? kPlanTileTokens / 2 : 0;
}

inline CUtensorMap make_map(const Params& p, int box_rows = kPlanTileTokens) {
  const int64_t element = size_of(p.kv_dtype);
  return attnops::sm90::make_tensor_map({.dtype = p.kv_dtype,
                                         .base = p.kv_pages,
                                         .extents = {kHeadDimQk, static_cast<uint64_t>(p.page_table.page_size),
                                                     static_cast<uint64_t>(p.page_table.num_pages)},
                                         .strides = {static_cast<uint64_t>(p.kv_stride_token * element),
                                                     static_cast<uint64_t>(p.kv_stride_page * element)},
                                         .box_rows = static_cast<uint32_t>(box_rows),
                                         .fetch = CU_TENSOR_MAP_L2_PROMOTION_L2_128B});
}

inline CUtensorMap make_query_map(const Params& p, const void* base, int width, int64_t head, int64_t request) {
  const int rows = p.seqlen_q * p.num_q_heads;
  const int64_t element = size_of(p.dtype);
  return attnops::sm90::make_tensor_map(
      {.dtype = p.dtype,
       .base = base,
       .extents = {static_cast<uint64_t>(width), static_cast<uint64_t>(rows), static_cast<uint64_t>(p.batch_size)},
       .strides = {static_cast<uint64_t>(head * element),
                   static_cast<uint64_t>((p.batch_size == 1 ? head * rows : request) * element)},
       .box_rows = kPlanRows});
}

// The largest power of two that divides every stride between rows of a pool, in bytes, if 32 bits of it reach the last
// one.
inline RowUnits row_units(int64_t stride_page, int64_t stride_token, int64_t tokens, int64_t pages) {
  const int64_t page = pages > 1 ? stride_page : 0, token = tokens > 1 ? stride_token : 0;
  const int64_t unit = int64_t{1} << min_of(__builtin_ctzll(page | token | 1 << 20), 20);
  const int64_t last = (max_of(pages - 1, int64_t{0}) * page + (tokens - 1) * token) / unit;
  if (page < 0 || token < 0 || last > UINT32_MAX) return {};
  return {static_cast<uint32_t>(unit), static_cast<uint32_t>(page / unit), static_cast<uint32_t>(token / unit)};
}

inline RowUnits row_units(const Params& p) {
  const int64_t element = size_of(p.kv_dtype);
  return row_units(p.kv_stride_page * element, p.kv_stride_token * element, p.page_table.page_size,
                   p.page_table.num_pages);
}

inline RowUnits row_units(const SelectedRows& rows, DType dtype) {
  const int64_t element = size_of(dtype);
  return row_units(rows.stride_page * element, rows.stride_token * element, rows.page_size,
                   rows.num_rows / rows.page_size);
}

inline Maps make_maps(const Params& p, const Modes& modes) {
  Maps maps{};
  if (modes.use_boxes) maps.kv = make_map(p, kPlanTileTokens >> modes.box_shift);
  if (modes.queries_by_map) {
    // Of rows of 512 values, the box of the rope part lies behind the last column, and is zeros.
    const int width = p.q_pe || p.shared_rows ? kHeadDimV : kHeadDimQk;
    maps.q = make_query_map(p, p.q, width, p.q_stride_head, p.q_stride_request);
    if (p.q_pe) maps.q_pe = make_query_map(p, p.q_pe, kHeadDimRope, p.q_pe_stride_head, p.q_pe_stride_request);
  }
  return maps;
}

inline constexpr int kMergeShares = 2;  // CTAs of the merge for each part: what fits the GPU at a time

template <typename T, int kVecs, int kBatch>
void launch_merge_units(const Params& p, int blocks, int parts, cudaStream_t stream) {
  launch_dependent<&mla_merge_units_kernel<T, kVecs, kBatch>>(
      "mla_merge_units_kernel", {p.batch_size, kCombineWarps * 32, 0, 0, blocks, parts}, stream, p, output_aligned(p));
}

template <typename T>
void launch_merge(const Params& p, cudaStream_t stream) {
  if (p.fixed_split_tokens == 0) {
    launch_dependent<&mla_merge_shares_kernel<T>>("mla_merge_shares_kernel",
                                                  {p.num_sm_parts, kCombineWarps * 32, 0, 0, kMergeShares}, stream, p,
                                                  output_aligned(p));
    return;
  }
  const int blocks = blocks_per_request(p.seqlen_q, p.num_q_heads);
  // As many CTAs as run at once, if there is work for them: few blocks are cut into smaller units.
  constexpr int kManyCtas = 264;
  const auto most_parts = [](int vecs) { return kPlanRows / 16 * 2 * kPartialVecs / vecs; };
  int parts = 1;
  while (parts < most_parts(1) && p.batch_size * blocks * parts * 2 <= kManyCtas) parts *= 2;
  if (parts > most_parts(2)) {
    launch_merge_units<T, 1, 4>(p, blocks, parts, stream);
  } else {
    launch_merge_units<T, 2, 4>(p, blocks, parts, stream);
  }
}

template <typename T, Options kOptions, Loads kLoads>
void launch_attention(const Params& p, const Modes& modes, cudaStream_t stream) {
  Maps maps = make_maps(p, modes);
  if (kOptions == Options::kCommon && kLoads == Loads::kBoxes) maps.kv_half = make_map(p, kPlanTileTokens / 2);
  launch_dependent<&mla_decode_kernel<T, kOptions, kLoads>>(
      "mla_decode_kernel", {p.num_sm_parts, kThreads, kSharedBytes, kSharedBytes}, stream, p, maps, modes);
}

// Rows of the output, 16 a box.
inline CUtensorMap make_out_map(const Params& p) {
  const int64_t element = size_of(p.dtype);
  const auto stride = [&](int64_t count, int64_t n) { return static_cast<uint64_t>(count > 1 ? n * element : 16); };
  return attnops::sm90::make_tensor_map(
      {.dtype = p.dtype,
       .base = p.out,
       .extents = {kHeadDimV, static_cast<uint64_t>(p.num_q_heads), static_cast<uint64_t>(p.batch_size)},
       .strides = {stride(p.num_q_heads, p.out_stride_head), stride(p.batch_size, p.out_stride_request)},
       .box_rows = 16});
}

// As of a common call, but for rows' places.
inline Maps make_list_maps(const Params& p, const Modes& modes) {
  Maps maps{};
  if (modes.out_by_map) maps.kv = make_out_map(p);
  if (!modes.queries_by_map) return maps;
  const Maps common = make_maps(p, modes);
  maps.q_pe = p.q_pe ? common.q_pe : common.q;
  const int64_t element = size_of(p.dtype);
  const int64_t request = p.batch_size == 1 ? p.q_stride_head * p.num_q_heads : p.q_stride_request;
  maps.q = attnops::sm90::make_row_map(
      {.dtype = p.dtype,
       .base = p.q,
       .extents = {kHeadDimV, static_cast<uint64_t>(p.num_q_heads), static_cast<uint64_t>(p.batch_size)},
       .strides = {static_cast<uint64_t>(p.q_stride_head * element), static_cast<uint64_t>(request * element)},
       .box_rows = kPlanRows});
  return maps;
}

inline Modes list_modes(const Params& p) {
  const bool out_by_map = output_aligned(p) && (p.num_q_heads == 1 || p.out_stride_head > 0) &&
                          (p.batch_size == 1 || p.out_stride_request > 0);
  return {.use_boxes = false,
          .queries_by_map = queries_fit(p),
          .out_aligned = output_aligned(p),
          .tiles_per_page = 1,
          .box_shift = 0,
          .by_page_size = Divisor(p.selected.page_size),
          .units = row_units(p.selected, p.kv_dtype),
          .by_extra_size = Divisor(p.extra.page_size),
          .extra_units = row_units(p.extra, p.kv_dtype),
          .out_by_map = out_by_map && HeadMasks(p).bits == nullptr};
}

// Lists of rows.
template <typename T>
void launch_selected(const Params& given, cudaStream_t stream) {
  if (given.batch_size == 0) return;
  const Params p = as_page_table(given);
  const Modes modes = list_modes(p);
  if (HeadMasks(p).bits != nullptr) return launch_attention<T, Options::kMasked, Loads::kGathered>(p, modes, stream);
  launch_dependent<&mla_decode_kernel<T, Options::kSelected, Loads::kGathered>>(
      "mla_decode_kernel", {p.num_sm_parts, kThreads, kSharedBytes, kSharedBytes}, stream, p, make_list_maps(p, modes),
      modes);
  if (p.tile_scheduler_metadata) launch_merge<T>(p, stream);
}

inline Modes modes_of(const Params& p) {
  const int box_rows = rows_of_box(p);
  return {.use_boxes = box_rows > 0,
          .queries_by_map = queries_fit(p),
          .out_aligned = output_aligned(p),
          .tiles_per_page = max_of(p.page_table.page_size / kPlanTileTokens, 1),
          .box_shift = box_rows > 0 ? __builtin_ctz(kPlanTileTokens / box_rows) : 0,
          .by_page_size = Divisor(p.page_table.page_size),
          .units = row_units(p)};
}

// Calls that ring::unsuited has nothing against.
template <typename T>
void launch_ring(const Params& p, cudaStream_t stream) {
  if (p.batch_size == 0) return;
  ring::launch_attention<T>(p, make_maps(p, modes_of(p)), stream);
  launch_merge<T>(p, stream);
}

template <typename T>
void launch(const Params& p, cudaStream_t stream) {
  if (p.batch_size == 0) return;
  const Modes modes = modes_of(p);
  const bool reached = modes.use_boxes || modes.units.bytes != 0;
  if (!is_common(p, modes.out_aligned) || !reached) {
    launch_attention<T, Options::kAll, Loads::kAny>(p, modes, stream);
  } else if (!modes.use_boxes) {
    launch_attention<T, Options::kCommon, Loads::kGathered>(p, modes, stream);
  } else if (modes.box_shift > 0) {
    launch_attention<T, Options::kCommon, Loads::kAny>(p, modes, stream);
  } else {
    launch_attention<T, Options::kCommon, Loads::kBoxes>(p, modes, stream);
  }
  launch_merge<T>(p, stream);
}

}  // namespace attnops::mla_decode::sm90
