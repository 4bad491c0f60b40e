#pragma once
#include <string>

#include "device/common/arch.h"
#include "device/common/vec.h"
#include "xqa_decode/params.h"

namespace attnops::xqa_decode::sm90 {

// Whether the copy engine can walk these strides, in elements: dimensions of one element have none.
inline bool boxes_fit(const Params& p, const void* base, int64_t page, int64_t token, int64_t head) {
  const auto fits = [](int64_t stride, int64_t extent) {
    return extent <= 1 || (stride > 0 && stride < int64_t{1} << 38);
  };
  return fits(page, p.page_table.num_pages) && fits(token, p.page_table.page_size) && fits(head, p.num_kv_heads) &&
         rows_aligned(base, 2, 16, p.page_table.num_pages > 1 ? page : 0, p.page_table.page_size > 1 ? token : 0,
                      p.num_kv_heads > 1 ? head : 0);
}

// Why the Hopper kernels do not serve these arguments; "" when they do.
inline std::string reject(const Params& p) {
  const int page_size = p.page_table.page_size;
  if (page_size < 8 || (page_size & (page_size - 1)) != 0) {
    return "takes page_size 8, 16, 32, ..., got " + std::to_string(page_size);
  }
  if (p.page_table.num_pages < 1) return "takes at least one page, got none";
  if (p.report) return "has no checked mode, got report";
  if (!boxes_fit(p, p.k_pages, p.k_stride_page, p.k_stride_token, p.k_stride_head)) {
    return "takes k_pages whose rows start on 16-byte boundaries, with positive strides";
  }
  if (!boxes_fit(p, p.v_pages, p.v_stride_page, p.v_stride_token, p.v_stride_head)) {
    return "takes v_pages whose rows start on 16-byte boundaries, with positive strides";
  }
  const int sm = device_sm("xqa_decode");
  if (sm != 90) return "runs on sm_90, this device is sm_" + std::to_string(sm);
  return "";
}

}  // namespace attnops::xqa_decode::sm90
