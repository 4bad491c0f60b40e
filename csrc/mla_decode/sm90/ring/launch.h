#pragma once
#include "mla_decode/params.h"

struct CUstream_st;

namespace attnops::mla_decode::sm90 {
struct Maps;
}

namespace attnops::mla_decode::sm90::ring {

struct ListedRows;

// Whether calls of this size run faster in the ring.
bool suits(const Params& p);

// Attention over the parts of the plan, of calls that ask for nothing that Options::kCommon leaves out but for a tree
// mask, and whose pages hold whole tiles. What parts share is not merged yet.
template <typename T>
void launch_attention(const Params& p, const Maps& maps, CUstream_st* stream);

// Lists of rows without a plan, of calls that ask for no more than this: an aligned output, queries by the copy engine,
// a positive scale, rows of 576 values that 32 bits reach, no checked mode.
template <typename T>
void launch_lists(const Params& p, const Maps& maps, const ListedRows& rows, CUstream_st* stream);

}  // namespace attnops::mla_decode::sm90::ring
