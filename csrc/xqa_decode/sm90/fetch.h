#pragma once
#include "xqa_decode/params.h"

namespace attnops::xqa_decode::sm90 {

// How a call's keys and values are asked for.
struct Fetch {
  bool whole_lines;  // a miss in L2 fetches 128 bytes, not the sectors alone
  int most_units;    // of a long piece, on their way at a time
};
Fetch choose_fetch(const Params& params);

}  // namespace attnops::xqa_decode::sm90
