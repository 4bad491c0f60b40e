#pragma once
#include "device/common/arch.h"
#include "mla_decode/params.h"

namespace attnops::mla_decode::sm90 {

// A list of rows as a page table of pages of one row, as the kernels walk it. Where a pool has no gaps, its pages are
// of no meaning either. Without a plan there is a part for each SM.
inline Params as_page_table(Params p) {
  if (p.tile_scheduler_metadata == nullptr) p.num_sm_parts = device_sms("sparse_mla_prefill");
  p.division = work_division(1, p.num_q_heads, p.num_sm_parts);
  const bool has_scales_behind = p.shared_rows && p.kv_dtype == DType::kUInt8;
  for (SelectedRows* pool : {&p.selected, &p.extra}) {
    if (has_scales_behind || pool->page_size <= 1 || pool->stride_page != pool->stride_token * pool->page_size)
      continue;
    pool->page_size = 1;
    pool->stride_page = pool->stride_token;
  }
  const SelectedRows& rows = p.selected;
  p.page_table = {.cells = rows.indices,
                  .kv_indptr = nullptr,
                  .stride_request = rows.stride_list,
                  .num_pages = rows.num_rows,
                  .page_size = 1,
                  .max_pages = p.extra.count > 0 ? round_up(rows.count, kListAlignment) + p.extra.count : rows.count,
                  .num_indices = 0};
  p.kv_pages = rows.pages;
  p.kv_stride_page = rows.stride_page;
  p.kv_stride_token = rows.stride_token;
  return p;
}

}  // namespace attnops::mla_decode::sm90
