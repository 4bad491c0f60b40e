#pragma once
#include "mla_decode/sm90/few_rows/launch.cuh"
#include "mla_decode/sm90/fp8_fragments/layout.h"
#include "mla_decode/sm90/fp8_fragments/paging.cuh"

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

}  // namespace attnops::mla_decode::sm90::fp8_fragments
