#pragma once
#include "mla_decode/params.h"

struct CUstream_st;

namespace attnops::mla_decode::sm90::converted {

// Lists of rows of 656 bytes, as selected.h walks them, where the kernel that converts their tiles takes them; false:
// it does not.
bool launch_bf16(const Params& p, CUstream_st* stream);

}  // namespace attnops::mla_decode::sm90::converted
