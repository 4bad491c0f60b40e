#pragma once
#include "causal_conv1d/params.h"

namespace attnops::causal_conv1d::cpu {

inline constexpr int64_t kBlock = 64;  // channels that run side by side

// A request's channels from `begin` on, those before `end`.
void run_channels(const Params& p, int64_t request, int64_t begin, int64_t end);

// The same of drafts.
void run_drafts(const DraftParams& p, int64_t request, int64_t begin, int64_t end);

}  // namespace attnops::causal_conv1d::cpu
