#pragma once
#include "core/linear_verify.h"

struct CUstream_st;

namespace attnops::ssd::sm90 {

// Drafts of many requests, where a kernel of this architecture takes them; false: it does not.
bool launch_verify(const LinearVerify& params, CUstream_st* stream);

}  // namespace attnops::ssd::sm90
