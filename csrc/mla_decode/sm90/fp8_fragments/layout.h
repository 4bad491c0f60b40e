#pragma once
#include <cstdint>

#include "core/math.h"
#include "mla_decode/params.h"
#include "mla_decode/plan.h"
#include "mla_decode/sm90/few_rows/layout.h"
#include "mla_decode/sm90/pieces.cuh"
#include "mla_decode/sm90/quarters.h"

// Sizes and shared memory of the kernel for few query rows over e4m3 caches.
namespace attnops::mla_decode::sm90::fp8_fragments {

using few_rows::kGroupThreads;

// The FP8 formats of a cached token.
enum class Format {
  kDense,   // 576 e4m3; one scale for all, applied to scores and outputs, so that conversion is exact
  kRow,     // 512 e4m3, 4 float32 scales (one per 128), 64 bf16 rope
  kShared,  // 448 e4m3, 64 bf16 rope, all of it the value; behind the page's rows 7 ue8m0 scales (one per 64) and a pad
};

// Teams of two warpgroups multiply: of two teams, team 0 the even tiles of a piece, team 1 the odd ones. Within a team,
// group 0 has the first half of a tile's columns, group 1 the second.
inline constexpr int kGroups = 2;
inline constexpr int kTeamThreads = kGroups * kGroupThreads;

// K and V have 64 columns a piece: eight pieces of the latent and one of rope.
inline constexpr int kPieces = 9;
inline constexpr int kPieceBytes = 64;  // of e4m3

// How a KV tile lies in shared memory: in groups of eight tokens, whole rows together, each one contiguous run of
// memory where the tokens share a page. Matrices of eight tokens x 16 bytes must spread over all banks.
template <Format kFormat>
struct Storage;

// Rows of 576 bytes: nine pieces of 64 under the 64-byte swizzle.
template <>
struct Storage<Format::kDense> {
  static constexpr int kRowBytes = 576;
  static constexpr int kGroupBytes = kGroupTokens * kRowBytes;

  // Where 16 bytes of a token's piece lie: chunk 0 .. 3.
  __device__ static uint32_t place(int token, int piece, int chunk) {
    const int row = token % kGroupTokens;
    return token / kGroupTokens * kGroupBytes + piece * kGroupTokens * kPieceBytes + row * kPieceBytes +
           ((chunk ^ (row / 2)) << 4);
  }
  // From chunk 0 or 1 of a piece to chunk 2 or 3.
  __device__ static uint32_t second_half(uint32_t place) { return place ^ 32; }
};

// Rows of 656 bytes as they are: 41 x 16 bytes, an odd number.
template <>
struct Storage<Format::kRow> {
  static constexpr int kRowBytes = kFp8RowBytes;
  static constexpr int kGroupBytes = kGroupTokens * kRowBytes;
  static constexpr int kScales = 512, kRope = kScales + 4 * 4;  // offsets: float [4], bf16 [64]

  __device__ static uint32_t place(int token, int piece, int chunk) {
    return token * kRowBytes + piece * kPieceBytes + chunk * 16;
  }
  __device__ static uint32_t second_half(uint32_t place) { return place + 32; }
};

// Rows of 584 bytes, each with its scales, at an odd multiple of 16 bytes.
template <>
struct Storage<Format::kShared> {
  static constexpr int kRowBytes = kSharedRowBytes + 8;
  static constexpr int kGroupBytes = kGroupTokens * kRowBytes;
  static constexpr int kRope = kSharedNope, kScales = kSharedDataBytes;  // offsets: bf16 [64], ue8m0 [7]
  static_assert(kRowBytes % 32 == 16);

  __device__ static uint32_t place(int token, int piece, int chunk) {
    return token * kRowBytes + piece * kPieceBytes + chunk * 16;
  }
  __device__ static uint32_t second_half(uint32_t place) { return place + 32; }
};

// How pieces of a work are cut and merged: by the plan; in short calls (Params::list_cuts), merged by a kernel; the
// same, the pieces of a work being the CTAs of a cluster, which merge them.
enum class Cuts { kPlan, kShort, kCluster };

// What comes from the CTAs of a cluster: by piece, the states of 16 rows, float2 [kMostInCluster][16]; 64 units of
// accumulators of 512 bytes, divided evenly, of each piece (cluster_merge.cuh). Seven take most.
inline constexpr int kMostInCluster = 8, kClusterUnits = 64;
inline constexpr int kReceivedBytes = kMostInCluster * 16 * 8 + 7 * ceil_div(kClusterUnits, 7) * 512;

// The kernel for up to 16 query rows, and its shared memory in bytes from a 1 KB boundary.
template <Format kFormat_, Options kOptions_ = Options::kAll, Cuts kCuts = Cuts::kPlan>
struct Shape {
  static constexpr bool kShort = kCuts != Cuts::kPlan, kCluster = kCuts == Cuts::kCluster;
  static constexpr Format kFormat = kFormat_;
  static constexpr Options kOptions = kOptions_;
  static constexpr bool kScaled = kFormat == Format::kRow;                    // 128 columns of a row have a scale
  static constexpr bool kRounds = kScaled && kOptions == Options::kSelected;  // where asked to: rounded_keys.h
  using Rows = Storage<kFormat>;
  static constexpr int kTileBytes = kPlanTileTokens * Rows::kRowBytes;
  static constexpr int kQuarterBytes = kGroupsPerWarp * Rows::kGroupBytes;

  static constexpr int kRows = 16;
  static constexpr bool kQueriesInRing = false;
  static constexpr int kQueries = kRows / 4;      // rows that a thread's fragment of a product holds a part of
  static constexpr int kSoftmaxRows = kRows / 2;  // the softmax of a row is one group's: group 0 has the first half
  static constexpr int kTeams = 2;
  // A team must have seen a slot's tile before it waits for the next one there, or the wait's parity says nothing:
  // slots belong to teams, so they are as many for each.
  static constexpr int kRingTiles = 4;
  static_assert(kRingTiles % kTeams == 0);

  static constexpr int kConsumerThreads = kTeams * kTeamThreads;
  static constexpr int kQueryThreads = kConsumerThreads;  // that bring the queries
  static constexpr int kThreads = kConsumerThreads + 32 * kLoadingWarps;
  // A CTA never has more registers than its launch took: 96 per thread.
  static constexpr int kConsumerRegisters = 104, kLoaderRegisters = 64;
  static_assert(kTeams * kGroups * kConsumerRegisters + kLoaderRegisters <= 5 * 96);

  static constexpr int kQueryPiece = kRows * 128;  // 64 columns of all rows, 16 bit
  static constexpr int kQ = 0;
  static constexpr int kKv = kPieces * kQueryPiece;
  // Probabilities by team, rows are queries; of rows with scales, a copy for each.
  static constexpr int kP = kKv + kRingTiles * kTileBytes;
  static constexpr int kProbabilityBytes = (kScaled ? 4 : 1) * kQueryPiece;
  static constexpr int kScores = kP + kTeams * kProbabilityBytes;  // by team: scores on their way between its groups
  static constexpr int kScoresBytes = kRows / 2 * 128 * 4;
  // At the end of a piece, in their place: outputs on their way between the teams, 16 of a thread.
  static constexpr int kOutputs = kP;
  static constexpr int kOutputBytes = kConsumerThreads * 16 * 4;
  static constexpr int kStates = max_of(kScores + kTeams * kScoresBytes, kOutputs + kOutputBytes);  // by team
  // Of a team:
  static constexpr int kSumWarps = 4;                               // that know a part of a row's sum
  static constexpr int kMaxima = 0;                                 // float [kSumWarps][kRows]
  static constexpr int kSums = kMaxima + kSumWarps * kRows * 4;     // float [kSumWarps][kRows]
  static constexpr int kReference = kSums + kSumWarps * kRows * 4;  // float [kRows]
  static constexpr int kFactor = kReference + kRows * 4;            // float [kRows]
  static constexpr int kMoved = kFactor + kRows * 4;                // int [2], by group
  static constexpr int kStateBytes = kMoved + 16;

  static constexpr int kQueryScale = kStates + kTeams * kStateBytes;  // float [kRows]
  static constexpr int kRowEnds = kQueryScale + kRows * 4;            // RowEnd [kRows], 16 bytes each
  static constexpr int kBarriers = kRowEnds + kRows * 16;             // of a slot: full, empty
  static constexpr int kMoveBarriers = kBarriers + 16 * kRingTiles;   // by group of all teams
  // Of lists: uint16 [kRingTiles][4], by slot and loading warp: which of its keys there are.
  static constexpr int kListed = kMoveBarriers + 8 * kTeams * kGroups;
  static constexpr int kEnd = kListed + (kOptions == Options::kSelected ? 8 * kRingTiles : 0);
  // What comes from a cluster lies in the ring.
  static constexpr int kMergeBarrier = kEnd, kReceived = kKv, kMergeWarps = kConsumerThreads / 32;
  static constexpr int kBytes = kEnd + (kCluster ? 8 : 0);
  static_assert(!kCluster || kRingTiles * kTileBytes >= kReceivedBytes);
  static_assert(kBytes <= 227 * 1024);

  // Full when all lanes of the loading warps have arrived, empty when all threads of a team have.
  __device__ static uint32_t full_barrier(uint32_t shared, int slot) { return shared + kBarriers + 16 * slot; }
  __device__ static uint32_t empty_barrier(uint32_t shared, int slot) { return full_barrier(shared, slot) + 8; }
};

// Hardware barriers: all that multiply; by team: halves of the scores are there, probabilities are there; by group.
// Between two of those where all meet, every warp passes as many: compute-sanitizer's racecheck goes by their number.
enum NamedBarrier : int { kAll = 1, kTeamScores = 2, kTeamProbabilities = 4, kOwn = 6 };

}  // namespace attnops::mla_decode::sm90::fp8_fragments
