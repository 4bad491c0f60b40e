#pragma once
#include "mla_decode/rounded_keys.h"
#include "mla_decode/sm90/converted/launch.h"
#include "mla_decode/sm90/launch.cuh"

namespace attnops::mla_decode::sm90::converted {

// By what a call has beside its number of tokens: the choice may not depend on that, or bits would.
inline bool suits(const Params& p, const Modes& modes) {
  constexpr int kMostPadded = 48;  // so many heads take blocks of their own
  return p.num_q_heads > kMostPadded && queries_fit(p) && !rounds_keys(p) && modes.units.bytes != 0 &&
         (p.extra.count == 0 || modes.extra_units.bytes != 0);
}

template <typename T>
bool launch(const Params& p, cudaStream_t stream) {
  const Modes modes = list_modes(p);
  if (!suits(p, modes)) return false;
  launch_dependent<&mla_decode_kernel<T, Options::kConverted, Loads::kGathered>>(
      "mla_decode_converted_kernel", {p.num_sm_parts, kThreads, kSharedBytes, kSharedBytes}, stream, p,
      make_list_maps(p, modes), modes);
  if (p.tile_scheduler_metadata) launch_merge<T>(p, stream);
  return true;
}

}  // namespace attnops::mla_decode::sm90::converted
