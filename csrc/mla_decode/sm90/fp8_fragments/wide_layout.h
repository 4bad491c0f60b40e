#pragma once
#include "mla_decode/sm90/fp8_fragments/layout.h"
#include "mla_decode/sm90/pieces.cuh"
#include "mla_decode/sm90/raw_queries.cuh"

// Sizes and shared memory of the kernel with roles over e4m3 caches.
namespace attnops::mla_decode::sm90::fp8_fragments {

// Three warpgroups multiply: two have 256 columns of V each, the third has the scores.
inline constexpr int kValueThreads = 2 * kGroupThreads;
inline constexpr int kWideBuffers = 2;  // of probabilities

struct alignas(16) StoredPiece {
  int request, first_row, num_rows, partial;
};

struct WideMaps {
  CUtensorMap kv;
  QueryMaps queries;
};

// What the host has found out about the arguments, besides few_rows::Modes.
struct WideModes {
  bool queries_by_map;  // queries come by the copy engine
  bool out_aligned;     // rows of the output start on 4-byte boundaries
};

// For blocks of kRows_ query rows, 16, 32, 48 or 64. kRounds: rounded_keys.h.
template <Format kFormat_, Options kOptions_, int kRows_ = kPlanRows, Cuts kCuts = Cuts::kPlan, bool kRounds_ = false>
struct WideShape {
  static constexpr bool kRounds = kRounds_;
  static constexpr Format kFormat = kFormat_;
  static constexpr bool kShort = kCuts != Cuts::kPlan, kCluster = kCuts == Cuts::kCluster;
  static constexpr Options kOptions = kOptions_;
  static constexpr bool kShared = kFormat == Format::kShared, kScaled = kShared || kFormat == Format::kRow;
  static constexpr int kPieces = kShared ? kHeadDimShared / 64 : fp8_fragments::kPieces;  // of 64 columns
  using Rows = Storage<kFormat>;
  static constexpr int kTileBytes = kPlanTileTokens * Rows::kRowBytes;
  static constexpr int kQuarterBytes = kGroupsPerWarp * Rows::kGroupBytes;
  static constexpr int kRows = kRows_;
  static constexpr bool kQueriesInRing = true;
  // What shared memory has room for beside the queries.
  static constexpr int kRingTiles = kRows == 64 || (kRows == 48 && kScaled) ? 3 : kRows >= 32 || kScaled ? 4 : 5;

  static constexpr int kConsumerThreads = kValueThreads + kGroupThreads;
  static constexpr int kThreads = kConsumerThreads + 32 * kLoadingWarps;
  // A CTA never has more registers than its launch took: 128 per thread.
  static constexpr int kValueRegisters = kScaled ? 184 : 176, kScoreRegisters = kScaled ? 112 : 128;
  static constexpr int kLoaderRegisters = 32;
  static_assert(2 * kValueRegisters + kScoreRegisters + kLoaderRegisters <= 4 * 128);

  static constexpr int kQueryPiece = kRows * 128;  // 64 columns of all rows, 16 bit
  static constexpr int kQ = 0;
  static constexpr int kKv = kPieces * kQueryPiece;
  static constexpr int kP = kKv + kRingTiles * kTileBytes;            // by buffer; rows are queries
  static constexpr int kFactor = kP + kWideBuffers * kQueryPiece;     // float [kWideBuffers][kRows]
  static constexpr int kMaxima = kFactor + kWideBuffers * kRows * 4;  // float [4][kRows], by warp
  static constexpr int kTotals = kMaxima + 4 * kRows * 4;             // by parity of the piece, see below
  static constexpr int kTotalsBytes = 5 * kRows * 4;                  // float [4][kRows], sums by warp; references
  static constexpr int kRowPairs = kTotals + 2 * kTotalsBytes;        // float4 [kRows / 2]
  static constexpr int kQueryScale = kRowPairs + kRows / 2 * 16;      // float [kRows]
  static constexpr int kSeenEnds = kQueryScale + kRows * 4;           // int [kRows]: past the last key that a row sees
  static constexpr int kEnds = kSeenEnds + kRows * 4;                 // TransposedEnds, 16 bytes a row of a block
  // By block of 128 columns, or of 64 where values are shared, the last of which are bf16.
  static constexpr int kRatios = kEnds + kPlanRows * 16;  // fp16 [kWideBuffers][4 or 8][64]
  static constexpr int kRatioBytes = (kShared ? 8 : kScaled ? 4 : 0) * kPlanTileTokens * 2;
  static constexpr int kMoved = kRatios + kWideBuffers * kRatioBytes;  // int [kWideBuffers]
  static constexpr int kMost = kMoved + 16;   // float [2][4]: the largest scale, by parity of the piece and warp
  static constexpr int kStored = kMost + 32;  // StoredPiece [2], by parity of the piece
  static constexpr int kParity = kStored + 2 * sizeof(StoredPiece);  // int: of the piece whose scores are computed
  static constexpr int kEntry = kParity + 16;                        // the part's row of the plan
  static constexpr int kBarriers = kEntry + 32;                      // of a slot: full, empty; of a buffer, too
  static constexpr int kPieceBarriers = kBarriers + 16 * (kRingTiles + kWideBuffers);
  // Of lists: uint16 [kRingTiles][4], by slot and loading warp: which of its keys there are.
  static constexpr int kListed = kPieceBarriers + 2 * 8;
  static constexpr int kEnd = kListed + (kOptions == Options::kSelected ? 8 * kRingTiles : 0);
  static constexpr int kMergeBarrier = kEnd, kReceived = (kEnd + 8 + 15) / 16 * 16, kMergeWarps = kValueThreads / 32;
  static constexpr int kBytes = kCluster ? kReceived + kReceivedBytes : kEnd;
  static_assert(kBytes <= 227 * 1024 && kBarriers % 16 == 0 && kEnds % 16 == 0);

  __device__ static int totals(int parity) { return kTotals + parity * kTotalsBytes; }

  // Full when all lanes of the loading warps have arrived, empty when all threads that multiply by V have.
  __device__ static uint32_t full_barrier(uint32_t shared, int slot) { return shared + kBarriers + 16 * slot; }
  __device__ static uint32_t empty_barrier(uint32_t shared, int slot) { return full_barrier(shared, slot) + 8; }
  // Of probabilities.
  __device__ static uint32_t given_barrier(uint32_t shared, int buffer) {
    return shared + kBarriers + 16 * (kRingTiles + buffer);
  }
  __device__ static uint32_t taken_barrier(uint32_t shared, int buffer) { return given_barrier(shared, buffer) + 8; }
  // Of a piece: its queries are there; all that multiply meet, and its sums are there.
  __device__ static uint32_t queries_barrier(uint32_t shared) { return shared + kPieceBarriers; }
  __device__ static uint32_t sums_barrier(uint32_t shared) { return queries_barrier(shared) + 8; }
};

// Hardware barriers: within the warpgroup with the scores; of those with values. They pass different numbers of them,
// so they meet at barriers in memory: docs/sanitizer.md.
enum WideBarrier : int { kScoreWarps = 1, kValueWarps = 2 };

}  // namespace attnops::mla_decode::sm90::fp8_fragments
