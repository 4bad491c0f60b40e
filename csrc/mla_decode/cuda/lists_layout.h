#pragma once
#include "mla_decode/params.h"
#include "mla_decode/plan.h"

// Sizes of the portable kernel over lists of rows.
namespace attnops::mla_decode::lists {

inline constexpr int kThreads = 256, kWarps = kThreads / 32;
inline constexpr int kKeys = 32;                       // at a time: half a tile of the plan, a key per lane
inline constexpr int kLanesPerRow = kThreads / kKeys;  // that load a key
inline constexpr int kRowStride = kHeadDimQk + 8;  // elements: an odd number of 16-byte chunks, so that banks differ
inline constexpr int kScoreStride = kKeys + 4;     // floats, odd in chunks as well; probabilities take their place

// For blocks of kTiles times 16 rows. Offsets in bytes.
template <int kTiles>
struct Layout {
  static constexpr int kRows = 16 * kTiles;
  static constexpr int kQ = 0;
  static constexpr int kK = kQ + kRows * kRowStride * 2;
  static constexpr int kScores = kK + kKeys * kRowStride * 2;
  static constexpr int kFactor = kScores + kRows * kScoreStride * 4;  // float [kRows]
  static constexpr int kHasKey = kFactor + kRows * 4;                 // int [kKeys]
  static constexpr int kBytes = kHasKey + kKeys * 4;
  static_assert(kK % 16 == 0 && kScores % 16 == 0 && kFactor % 16 == 0);
};

}  // namespace attnops::mla_decode::lists
