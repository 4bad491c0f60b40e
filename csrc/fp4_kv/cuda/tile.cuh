#pragma once
#include <climits>

#include "core/math.h"
#include "fp4_kv/params.h"

// The tiles of a decode over pages of four bits: their size, their places in shared memory, and which pages have them.
namespace attnops::fp4_kv {

inline constexpr int kTileKeys = 32, kWarps = 4, kRowsOfTile = 8, kStages = 3;

// Whether a tile of keys lies in one page, and all strides within 31 bits.
__host__ __device__ inline bool tiles_in_pages(const DecodeParams& p, int tile_keys) {
  const auto near = [&](int64_t stride) { return stride >= 0 && stride < INT_MAX / tile_keys; };
  const auto all_near = [&](const Pages& pages) {
    return near(pages.codes_stride_page) && near(pages.scales_stride_page) && near(pages.codes_stride_token) &&
           near(pages.scales_stride_token);
  };
  return p.page_table.page_size % tile_keys == 0 && all_near(p.k) && all_near(p.v);
}

// Whether rows of scales start on boundaries of so many bytes.
__host__ __device__ inline bool scales_on(const Pages& pages, int bytes) {
  const int64_t all = reinterpret_cast<intptr_t>(pages.scales) | pages.scales_stride_page | pages.scales_stride_token |
                      pages.scales_stride_head;
  return all % bytes == 0;
}

// A tile of one side in shared memory: rows of codes, rows of scales. Of values, see `value_chunk`.
template <int kDim>
struct SideTile {
  static constexpr int kRowBytes = kDim / 2, kScaleBytes = kDim / 16;
  static constexpr int kScalesAt = kTileKeys * kRowBytes, kBytes = kScalesAt + kTileKeys * kScaleBytes;
  static_assert(kBytes % 128 == 0);
};

// Keys of kStages tiles, then their values.
template <int kDim>
inline constexpr int kWarpBytes = SideTile<kDim>::kBytes * 2 * kStages;

}  // namespace attnops::fp4_kv
