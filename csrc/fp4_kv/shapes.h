#pragma once
#include <climits>
#include <cstdint>

#include "core/math.h"
#include "fp4_kv/params.h"

// What kernels and their choice must know of pages and of MLA's rows.
namespace attnops::fp4_kv {

inline constexpr int kLatentDim = 576, kLatentDimV = 512, kLatentRows = 16, kLatentKeys = 64, kLatentWarps = 4;
inline constexpr int kTileKeys = 32, kRowsOfTile = 8;  // of K and V of their own

// Whether a tile of keys lies in one page, and all strides within 31 bits.
ATTNOPS_HOST_DEVICE inline bool tiles_in_pages(const DecodeParams& p, int tile_keys) {
  const auto near = [&](int64_t stride) { return stride >= 0 && stride < INT_MAX / tile_keys; };
  const auto all_near = [&](const Pages& pages) {
    return near(pages.codes_stride_page) && near(pages.scales_stride_page) && near(pages.codes_stride_token) &&
           near(pages.scales_stride_token);
  };
  return p.page_table.page_size % tile_keys == 0 && all_near(p.k) && all_near(p.v);
}

// Whether rows of scales start on boundaries of so many bytes.
ATTNOPS_HOST_DEVICE inline bool scales_on(const Pages& pages, int bytes) {
  const int64_t all = reinterpret_cast<intptr_t>(pages.scales) | pages.scales_stride_page | pages.scales_stride_token |
                      pages.scales_stride_head;
  return all % bytes == 0;
}

// Whether rows of codes and of scales start on boundaries of so many bytes.
inline bool rows_on(const Pages& pages, int codes, int scales) {
  const int64_t all = reinterpret_cast<intptr_t>(pages.codes) | pages.codes_stride_page | pages.codes_stride_token |
                      pages.codes_stride_head;
  return all % codes == 0 && scales_on(pages, scales);
}

}  // namespace attnops::fp4_kv
