#pragma once
#include <type_traits>

#include "mla_decode/sm90/converted/launch.h"
#include "mla_decode/sm90/few_rows/launch.cuh"
#include "mla_decode/sm90/fp8_fragments/kernel.cuh"
#include "mla_decode/sm90/fp8_fragments/launch.h"
#include "mla_decode/sm90/fp8_fragments/short_calls.cuh"
#include "mla_decode/sm90/fp8_fragments/wide.cuh"
#include "mla_decode/sm90/raw_query_maps.h"
#include "mla_decode/sm90/selected.h"

namespace attnops::mla_decode::sm90::fp8_fragments {

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
  if (is_common(p, wide.out_aligned)) {
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
      using Rounding = WideShape<kFormat, Options::kSelected, kRows, Cuts::kPlan, true>;
      return launch_wide_shape<T, Rounding>(p, wide, stream);
    }
  }
  launch_wide_shape<T, WideShape<kFormat, Options::kSelected, kRows>>(p, wide, stream);
}

// Lists of rows.
template <typename T, Format kFormat>
void launch_selected(const Params& given, cudaStream_t stream) {
  if (given.batch_size == 0) return;
  const Params p = as_page_table(given);
  if (launch_short<T, kFormat>(p, stream)) return;
  if constexpr (kFormat == Format::kRow && std::is_same_v<T, __nv_bfloat16>) {
    if (converted::launch_bf16(p, stream)) return;
  }
  if constexpr (kFormat == Format::kShared) {
    if (p.num_q_heads <= 16) return launch_selected_rows<T, kFormat, 16>(p, stream);
  } else {
    if (p.num_q_heads <= kFewRows) return launch_shape<T, Shape<kFormat, Options::kSelected>>(p, stream);
  }
  if (p.num_q_heads <= 32) return launch_selected_rows<T, kFormat, 32>(p, stream);
  if (p.num_q_heads <= 48) return launch_selected_rows<T, kFormat, 48>(p, stream);
  launch_selected_rows<T, kFormat, kPlanRows>(p, stream);
}

// Up to kFewRows rows.
template <typename T, Format kFormat>
void launch_few(const Params& p, cudaStream_t stream) {
  if (p.batch_size > 0) launch_shape<T, Shape<kFormat>>(p, stream);
}

template <typename T, Format kFormat>
void launch(const Params& p, cudaStream_t stream) {
  if (p.batch_size == 0) return;
  const int rows = p.seqlen_q * p.num_q_heads;
  if (rows <= 32) return launch_wide<T, kFormat, 32>(p, stream);
  if constexpr (kFormat == Format::kDense) {
    if (rows <= 48) return launch_wide<T, kFormat, 48>(p, stream);
  }
  launch_wide<T, kFormat, kPlanRows>(p, stream);
}

}  // namespace attnops::mla_decode::sm90::fp8_fragments
