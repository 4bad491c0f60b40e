#pragma once
#include "mla_decode/params.h"

struct CUstream_st;

namespace attnops::mla_decode::sm90 {
struct Maps;
struct Modes;
}  // namespace attnops::mla_decode::sm90

namespace attnops::mla_decode::sm90::ring {

inline constexpr int kManyTiles = 48;  // of a part: from here on the ring is faster

// Whether parts of a call of this size may suit the ring.
bool suits(const Params& p);

// Attention over the parts of the plan, of calls that ask for nothing that Options::kCommon leaves out and whose pages
// hold whole tiles: each in the ring, or, where it has few tiles, as in the kernel for all calls. What parts share is
// not merged yet.
template <typename T>
void launch_attention(const Params& p, const Maps& maps, const Modes& modes, CUstream_st* stream);

}  // namespace attnops::mla_decode::sm90::ring
