#pragma once
#include "mla_decode/params.h"

struct CUstream_st;

namespace attnops::mla_decode::sm90 {
struct Maps;
}

namespace attnops::mla_decode::sm90::ring {

// Attention over the parts of the plan, of calls that `unsuited` of limits.h has nothing against. What parts share is
// not merged yet.
template <typename T>
void launch_attention(const Params& p, const Maps& maps, CUstream_st* stream);

}  // namespace attnops::mla_decode::sm90::ring
