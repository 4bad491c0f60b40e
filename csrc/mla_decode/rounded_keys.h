#pragma once
#include "mla_decode/params.h"

// Keys of rows of 656 bytes, rounded to bf16 as FlashMLA's kernels round all of them before they multiply.
namespace attnops::mla_decode {

// Where a caller asks for it, scores of lists with so few keys are over rounded ones. Of longer lists a kernel may
// round tiles with so few. The roundings of more keys cancel: from six on, sgl_kernel's tests cannot tell.
inline constexpr int kFewKeys = 8;

// Whether the caller does: Params::fp8_products, of lists.
ATTNOPS_HOST_DEVICE inline bool rounds_keys(const Params& p) { return p.fp8_products; }

}  // namespace attnops::mla_decode
