#pragma once
#include "mla_decode/sm90/few_rows/launch.cuh"
#include "mla_decode/sm90/fp8_fragments/kernel.cuh"
#include "mla_decode/sm90/fp8_fragments/launch.h"
#include "mla_decode/sm90/fp8_fragments/wide.cuh"
#include "mla_decode/sm90/raw_query_maps.h"
#include "mla_decode/sm90/selected.h"

namespace attnops::mla_decode::sm90::fp8_fragments {

// Boxes of eight tokens, whole rows, which land piece by piece.
inline CUtensorMap make_map(const Params& p) {
  const auto page_size = static_cast<cuuint64_t>(p.page_table.page_size);
  const cuuint32_t box[4] = {kPieceBytes, kGroupTokens, kPieces, 1};
  const cuuint64_t extents[4] = {kPieceBytes, page_size, kPieces, static_cast<cuuint64_t>(p.page_table.num_pages)};
  const cuuint64_t strides[3] = {static_cast<cuuint64_t>(p.kv_stride_token), kPieceBytes,
                                 static_cast<cuuint64_t>(p.kv_stride_page)};
  return attnops::sm90::encode_tensor_map(p.kv_dtype, p.kv_pages, 4, extents, strides, box,
                                          CU_TENSOR_MAP_L2_PROMOTION_L2_128B, CU_TENSOR_MAP_SWIZZLE_64B);
}

// Groups of eight tokens come by the copy engine; of rows of 656 bytes, where they lie one after the other.
template <class At>
bool groups_fit(const Params& p) {
  return few_rows::groups_fit(p) && (!At::kScaled || p.kv_stride_token == At::Rows::kRowBytes);
}

template <class At>
Modes modes_of(const Params& p) {
  constexpr bool kSelects = At::kOptions == Options::kSelected;
  const int page_size = kSelects ? p.selected.page_size : p.page_table.page_size;
  return {.use_boxes = !kSelects && groups_fit<At>(p),
          .by_page_size = Divisor(page_size),
          .by_extra_size = kSelects ? Divisor(p.extra.page_size) : Divisor()};
}

template <typename T, class At>
void launch_shape(const Params& p, cudaStream_t stream) {
  const Modes modes = modes_of<At>(p);
  const CUtensorMap map = modes.use_boxes && !At::kScaled ? make_map(p) : CUtensorMap{};
  constexpr int kBytes = At::kBytes;
  launch_dependent<&mla_decode_fp8_fragments_kernel<T, At>>(
      "mla_decode_fp8_fragments_kernel", {p.num_sm_parts, At::kThreads, kBytes, kBytes}, stream, p, map, modes,
      rows_aligned(p.out, size_of(p.dtype), 4, p.out_stride_request, p.out_stride_token, p.out_stride_head));
  if (p.tile_scheduler_metadata) few_rows::launch_merge<T>(p, stream);
}

template <typename T, class At>
void launch_wide_shape(const Params& p, const WideModes& wide, cudaStream_t stream) {
  const Modes modes = modes_of<At>(p);
  WideMaps maps{};
  if (modes.use_boxes && !At::kScaled) maps.kv = make_map(p);
  if (wide.queries_by_map) maps.queries = make_raw_query_maps(p);
  constexpr int kBytes = At::kBytes;
  launch_dependent<&mla_decode_fp8_wide_kernel<T, At>>(
      "mla_decode_fp8_wide_kernel", {p.num_sm_parts, At::kThreads, kBytes, kBytes}, stream, p, maps, modes, wide);
  if (p.tile_scheduler_metadata) sm90::launch_merge<T>(p, stream);
}

template <typename T, Format kFormat, int kRows>
void launch_wide(const Params& p, cudaStream_t stream) {
  const WideModes wide{.queries_by_map = queries_fit(p),
                       .out_aligned = rows_aligned(p.out, size_of(p.dtype), 4, p.out_stride_request, p.out_stride_token,
                                                   p.out_stride_head)};
  if (is_common(p, {.queries_by_map = wide.queries_by_map, .out_aligned = wide.out_aligned})) {
    launch_wide_shape<T, WideShape<kFormat, Options::kCommon, kRows>>(p, wide, stream);
  } else {
    launch_wide_shape<T, WideShape<kFormat, Options::kAll, kRows>>(p, wide, stream);
  }
}

template <typename T, Format kFormat, int kRows>
void launch_selected_rows(const Params& p, cudaStream_t stream) {
  const WideModes wide{
      .queries_by_map = queries_fit(p),
      .out_aligned = rows_aligned(p.out, size_of(p.dtype), 4, p.out_stride_request, p.out_stride_head)};
  if constexpr (kFormat == Format::kRow) {
    if (rounds_keys(p)) {
      return launch_wide_shape<T, WideShape<kFormat, Options::kSelected, kRows, true>>(p, wide, stream);
    }
  }
  launch_wide_shape<T, WideShape<kFormat, Options::kSelected, kRows>>(p, wide, stream);
}

// Into how many pieces a short call over rows of 656 bytes cuts works of 16 heads; 0: it is none. More CTAs then read
// the same rows, but a tile of 16 heads takes a third of the time that one of 64 does, and a piece begins and ends
// sooner. By microseconds as measured, of lists that are full: the host sees no lengths. Batch-invariant plans and
// prefill are never short: a token's bits may not depend on how many there are.
inline int short_cuts(const Params& p) {
  constexpr int kWholeTiles = 3;  // not worth a merge
  const int64_t works = int64_t{p.batch_size} * ceil_div(p.num_q_heads, kShortRows);
  const int64_t wide_works = int64_t{p.batch_size} * ceil_div(p.num_q_heads, kPlanRows);
  if (p.tile_scheduler_metadata == nullptr || p.fixed_split_tokens != 0 || works > p.num_sm_parts) return 0;
  const int tiles = max_of(ceil_div(p.selected.count, kPlanTileTokens), 1);
  const int cuts = tiles > kWholeTiles ? min_of(p.num_sm_parts / static_cast<int>(works), tiles) : 1;
  // A plan cuts works of few heads as much. But its merge goes over rows and columns in turns, where pieces are many.
  if (p.num_q_heads <= kShortRows) {
    const bool many_pieces = cuts > 1 && tiles > 8 && works * 8 <= p.num_sm_parts;
    return p.num_q_heads < kShortRows && many_pieces ? cuts : 0;
  }
  const int64_t wide_tiles = ceil_div(wide_works * tiles, int64_t{p.num_sm_parts});
  const float wide_start = p.num_q_heads <= 32 ? 12.f : 13.5f, wide_tile = p.num_q_heads <= 32 ? 1.9f : 2.7f;
  const float merge = cuts == 1 ? 0.f : works > 16 ? 4.f : 2.f;
  const float time = 9.f + static_cast<float>(ceil_div(tiles, cuts)) + merge;
  return time * 1.05f < wide_start + wide_tile * static_cast<float>(wide_tiles) ? cuts : 0;
}

template <typename T>
void launch_short(Params p, int cuts, cudaStream_t stream) {
  const int works = p.batch_size * ceil_div(p.num_q_heads, kShortRows);
  p.list_cuts = cuts;
  p.num_sm_parts = works * cuts;
  p.tile_scheduler_metadata = nullptr;
  launch_shape<T, Shape<Format::kRow, Options::kSelected, true>>(p, stream);
  if (cuts > 1) few_rows::launch_short_merge<T>(p, works, stream);
}

// Lists of rows.
template <typename T, Format kFormat>
void launch_selected(const Params& given, cudaStream_t stream) {
  if (given.batch_size == 0) return;
  const Params p = as_page_table(given);
  if constexpr (kFormat == Format::kShared) {
    if (p.num_q_heads <= 16) return launch_selected_rows<T, kFormat, 16>(p, stream);
  } else {
    if (const int cuts = short_cuts(p)) return launch_short<T>(p, cuts, stream);
    if (p.num_q_heads <= kFewRows) return launch_shape<T, Shape<kFormat, Options::kSelected>>(p, stream);
  }
  if (p.num_q_heads <= 32) return launch_selected_rows<T, kFormat, 32>(p, stream);
  launch_selected_rows<T, kFormat, kPlanRows>(p, stream);
}

template <typename T, Format kFormat>
void launch(const Params& p, cudaStream_t stream) {
  if (p.batch_size == 0) return;
  const int rows = p.seqlen_q * p.num_q_heads;
  if (rows <= kFewRows) return launch_shape<T, Shape<kFormat>>(p, stream);
  if (rows <= 32) return launch_wide<T, kFormat, 32>(p, stream);
  if constexpr (kFormat == Format::kDense) {
    if (rows <= 48) return launch_wide<T, kFormat, 48>(p, stream);
  }
  launch_wide<T, kFormat, kPlanRows>(p, stream);
}

}  // namespace attnops::mla_decode::sm90::fp8_fragments
