#pragma once
#include <cstdint>

#include "mla_decode/plan.h"

// Sizes and shared memory of the kernel for few query rows.
namespace attnops::mla_decode::sm90::few_rows {

inline constexpr int kGroupThreads = 128;
inline constexpr int kConsumerThreads = 2 * kGroupThreads;
inline constexpr int kLoadingWarps = 4;
inline constexpr int kThreads = kConsumerThreads + 32 * kLoadingWarps;

// A row of 576 elements is nine pieces of 64, 128 bytes each, under the 128-byte swizzle. A KV tile is stored in groups
// of eight tokens, whole rows together: one contiguous run of memory where the tokens share a page.
inline constexpr int kPieces = 9;
inline constexpr int kPiecesV = 8;
inline constexpr int kGroupTokens = 8;
inline constexpr int kPieceStride = kGroupTokens * 128;
inline constexpr int kGroupStride = kPieces * kPieceStride;
inline constexpr int kGroupsPerTile = kPlanTileTokens / kGroupTokens;
inline constexpr int kTileBytes = kGroupsPerTile * kGroupStride;
inline constexpr int kGroupsPerWarp = kGroupsPerTile / kLoadingWarps;
inline constexpr int kQuarterTokens = kPlanTileTokens / kLoadingWarps;  // of a tile, per loading warp
inline constexpr int kQuarterBytes = kGroupsPerWarp * kGroupStride;

// How the two consumer groups share the work on a tile.
enum class Share {
  kDepth,  // scores: each takes half of the 576 columns; products: half of the
           // columns of V
  kRows,   // each takes half of the query rows, and needs nothing of the other
};

// A kernel for up to kRows query rows (a multiple of 8, of 16 when the groups share the rows), and its shared memory in
// bytes from a 1 KB boundary.
template <int kRows_, Share kShare, int kQuarters_>
struct Shape {
  static constexpr int kRows = kRows_;
  static constexpr int kQuarters = kQuarters_;  // of the ring
  static constexpr bool kByRows = kShare == Share::kRows;
  static constexpr int kGroupRows = kByRows ? kRows / 2 : kRows;  // query rows that a group multiplies
  static constexpr int kColumnTiles = kByRows ? 8 : 4;            // tiles of 64 columns of V that a group accumulates
  static constexpr int kQueries = kGroupRows / 4;                 // query rows that a thread holds a part of

  static constexpr int kQueryPiece = kRows * 128;
  static constexpr int kQ = 0;
  static constexpr int kKv = kPieces * kQueryPiece;
  static constexpr int kP = kKv + kQuarters * kQuarterBytes;  // probabilities, rows are queries
  static constexpr int kPartial = kP + kQueryPiece;           // float4 [kRows / 8][128]: group 1's half of the scores
  static constexpr int kMaxima = kPartial + (kByRows ? 0 : kRows / 2 * 128 * 4);  // float [4][kRows], by warp
  static constexpr int kSums = kMaxima + 4 * kRows * 4;                           // float [4][kRows], by warp
  static constexpr int kReference = kSums + 4 * kRows * 4;                        // float [kRows]
  static constexpr int kFactor = kReference + kRows * 4;                          // float [kRows]
  static constexpr int kMoved = kFactor + kRows * 4;                              // int
  static constexpr int kBarriers = kMoved + 8;                                    // see load.cuh
  static constexpr int kBytes = kBarriers + (2 * kQuarters + 2) * 8;
  static_assert(kBytes <= 227 * 1024);

  __device__ static int first_row(int group) { return kByRows ? group * kGroupRows : 0; }
};

// Hardware barriers: group 1's scores are there; probabilities are there; row sums are there; among group 0, group 1.
enum NamedBarrier : int { kScores = 1, kProbabilities = 2, kRowSums = 3, kGroup0 = 4, kGroup1 = 5 };

}  // namespace attnops::mla_decode::sm90::few_rows
