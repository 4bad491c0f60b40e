#pragma once
#include <cstdint>

#include "core/math.h"
#include "fmha/params.h"

namespace attnops::fmha::sm90 {

// In place of where a row lies: no row of the tile sees the key, or its page is outside the pool. It becomes zeros.
inline constexpr uint32_t kNobody = 0xffffffffu;

// Where rows of keys or values lie in their pool, in 32 bits: in units of the largest power of two that divides all
// strides.
struct RowUnits {
  uint32_t unit = 1;  // bytes
  uint32_t page = 0, token = 0, head = 0;

  ATTNOPS_HOST_DEVICE uint32_t place_of(int at_page, int at_token, int at_head) const {
    return static_cast<uint32_t>(at_page) * page + static_cast<uint32_t>(at_token) * token +
           static_cast<uint32_t>(at_head) * head;
  }
};

// False where 32 bits are too few.
inline bool find_row_units(const Params& p, bool keys, RowUnits& units) {
  const int64_t size = size_of(p.kv_dtype), pages = p.paged ? p.page_table.num_pages : 1,
                tokens = p.paged ? p.page_table.page_size : p.num_k_tokens;
  const int64_t page = pages > 1 ? (keys ? p.k_stride_page : p.v_stride_page) * size : 0;
  const int64_t token = tokens > 1 ? (keys ? p.k_stride_token : p.v_stride_token) * size : 0;
  const int64_t head = p.num_kv_heads > 1 ? (keys ? p.k_stride_head : p.v_stride_head) * size : 0;
  const int64_t bits = page | token | head | int64_t{1} << 30, unit = bits & -bits;
  const int64_t last =
      (pages - 1) * (page / unit) + (tokens - 1) * (token / unit) + (p.num_kv_heads - 1) * (head / unit);
  units = {static_cast<uint32_t>(unit), static_cast<uint32_t>(page / unit), static_cast<uint32_t>(token / unit),
           static_cast<uint32_t>(head / unit)};
  return last < int64_t{kNobody};
}

}  // namespace attnops::fmha::sm90
