#pragma once
#include <cstdint>

#include "mla_decode/plan.h"
#include "mla_decode/sm90/pieces.cuh"
#include "mla_decode/sm90/quarters.h"

// Sizes and shared memory of the kernel for few query rows.
namespace attnops::mla_decode::sm90::few_rows {

inline constexpr int kGroupThreads = 128;
inline constexpr int kConsumerThreads = 2 * kGroupThreads;
inline constexpr int kThreads = kConsumerThreads + 32 * kLoadingWarps;

// A row of 576 elements is nine pieces of 64, 128 bytes each, under the 128-byte swizzle. A KV tile is stored in groups
// of eight tokens, whole rows together: one contiguous run of memory where the tokens share a page.
inline constexpr int kPieces = 9;
inline constexpr int kPiecesV = 8;
inline constexpr int kPieceStride = kGroupTokens * 128;
inline constexpr int kGroupStride = kPieces * kPieceStride;
inline constexpr int kGroupsPerTile = kPlanTileTokens / kGroupTokens;
inline constexpr int kTileBytes = kGroupsPerTile * kGroupStride;
inline constexpr int kQuarterBytes = kGroupsPerWarp * kGroupStride;

// The ring of KV tiles: two, loaded and given back in quarters.
inline constexpr int kRingTiles = 2;
inline constexpr int kQuarters = kRingTiles * kLoadingWarps;

// Sums of the warps of a CTA that share blocks of a merge: eight floats of every lane (finish.cuh).
inline constexpr int kMergeBytes = kConsumerThreads * 8 * 4;

// A kernel for up to kRows query rows, a multiple of 16, and its shared memory in bytes from a 1 KB boundary.
template <int kRows_, Options kOptions_ = Options::kAll>
struct Shape {
  static constexpr int kRows = kRows_;
  static constexpr Options kOptions = kOptions_;
  static constexpr int kQueries = kRows / 4;  // rows that a thread's fragment of a product holds a part of

  // The softmax of a row is one group's: group 0 has the first half of the rows.
  static constexpr int kSoftmaxRows = kRows / 2;
  static constexpr int kRowBlocks = kRows / 8;

  __device__ static int first_softmax_row(int group) { return group * kSoftmaxRows; }

  static constexpr int kQueryPiece = kRows * 128;
  static constexpr int kQ = 0;
  static constexpr int kKv = kPieces * kQueryPiece;
  static constexpr int kP = kKv + kQuarters * kQuarterBytes;  // probabilities, rows are queries
  static constexpr int kPartial = kP + kQueryPiece;  // float4 [2][kRows / 16][128]: scores on their way to either group
  static constexpr int kSplitSums = kPartial + kRows / 2 * 128 * 4;  // float4 [256][2]: a merge's sums, by thread
  static constexpr int kMaxima = kSplitSums + kMergeBytes;           // float [4][kRows], by warp
  static constexpr int kSums = kMaxima + 4 * kRows * 4;              // float [4][kRows], by warp
  static constexpr int kReference = kSums + 4 * kRows * 4;           // float [kRows]
  static constexpr int kFactor = kReference + kRows * 4;             // float [kRows]
  static constexpr int kMoved = kFactor + kRows * 4;                 // int [2], by group
  static constexpr int kShares = kMoved + 16;                        // int [4]: what this CTA merges
  static constexpr int kBarriers = kShares + 16;                     // see load.cuh
  static constexpr int kMoveBarriers = kBarriers + (2 * kQuarters + 2) * 8 + 16;  // by group
  // Of lists: uint16 [kRingTiles][4], by slot and loading warp: which of its keys there are; float [4][kRows], the
  // largest scores by warp.
  static constexpr bool kSelects = kOptions == Options::kSelected;
  static constexpr int kListed = kMoveBarriers + 2 * 8;
  static constexpr int kTops = kListed + (kSelects ? 2 * kLoadingWarps * kRingTiles : 0);
  static constexpr int kBytes = kTops + (kSelects ? 4 * kRows * 4 : 0);
  static_assert(kBytes <= 227 * 1024);
};

// Hardware barriers: halves of the scores are there; probabilities are there; queries are there; among a group; steps
// of a merge.
enum NamedBarrier : int { kScores = 1, kProbabilities = 2, kQueries = 3, kGroup0 = 4, kGroup1 = 5, kMerge = 6 };

}  // namespace attnops::mla_decode::sm90::few_rows
