#pragma once

// Rows of 584 bytes, whose value is all of the key. A page of n: n times 448 e4m3 and 64 bfloat16, then n times 7 ue8m0
// scales (one per 64 values) and a pad.
namespace attnops {

inline constexpr int kSharedRowValues = 512, kSharedRowRope = 64, kSharedRowNope = kSharedRowValues - kSharedRowRope;
inline constexpr int kSharedRowDataBytes = kSharedRowNope + 2 * kSharedRowRope;
inline constexpr int kSharedRowScaleBytes = 8, kSharedRowScaleWidth = 64;

}  // namespace attnops
