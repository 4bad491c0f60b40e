#pragma once
#include "mla_decode/plan.h"

// KV tiles as four loading warps bring them: a quarter each, in two groups of eight tokens.
namespace attnops::mla_decode::sm90 {

inline constexpr int kLoadingWarps = 4;
inline constexpr int kGroupTokens = 8;  // one contiguous run of memory where they share a page
inline constexpr int kQuarterTokens = kPlanTileTokens / kLoadingWarps;
inline constexpr int kGroupsPerWarp = kQuarterTokens / kGroupTokens;

}  // namespace attnops::mla_decode::sm90
