#pragma once
#include "mla_decode/params.h"
#include "mla_decode/sm90/layout.h"

// Shared memory of the kernel that multiplies e4m3 as it lies. Operands are four tiles of 64 rows of 128 bytes for the
// latent, 8 KB each under the 128-byte swizzle, and 64 rows of 64 bytes for the rope part, under the 64-byte swizzle.
namespace attnops::mla_decode::sm90::fp8_products {

inline constexpr int kLatentTiles = kHeadDimV / 128;
inline constexpr int kRope = kLatentTiles * kTileBytes;  // offset of the rope part
inline constexpr int kStageBytes = kRope + 64 * 64;

// Of the rope part, and of probabilities: 16-byte chunk 0 .. 3 of a row.
__device__ inline int swizzled_half(int row, int chunk) { return row * 64 + ((chunk ^ (row / 2 & 3)) << 4); }

// Two warpgroups have 256 columns of V each, the third the scores; the fourth loads.
inline constexpr int kValueThreads = 2 * kGroupThreads;
inline constexpr int kMultiplyThreads = kValueThreads + kGroupThreads;
inline constexpr int kAllThreads = kMultiplyThreads + kGroupThreads;
// A CTA never has more registers than its launch took: 128 per thread.
inline constexpr int kValueRegisters = 184, kScoreRegisters = 112, kLoaderRegisters = 32;
static_assert(2 * kValueRegisters + kScoreRegisters + kLoaderRegisters <= 4 * 128);

struct alignas(16) StoredPiece {
  int request, first_row, num_rows, partial;
};

struct Layout {
  static constexpr int kStages = 5, kBuffers = 2;  // of tiles; of probabilities
  static constexpr int kProbabilityBytes = 64 * 64;
  static constexpr int kQ = 0;
  static constexpr int kKv = kStageBytes;
  static constexpr int kP = kKv + kStages * kStageBytes;
  static constexpr int kFactors = kP + kBuffers * kProbabilityBytes;  // float [kBuffers][64]: what a tile rescales by
  static constexpr int kTotals = kFactors + kBuffers * 64 * 4;        // float [2][2][64], by parity of the piece:
                                                                      // sums, references
  static constexpr int kQueryScale = kTotals + 2 * 2 * 64 * 4;        // float [64]
  static constexpr int kEnds = kQueryScale + 64 * 4;                  // TransposedEnds
  static constexpr int kRescales = kEnds + 64 * 16;                   // int [kBuffers]: whether a factor differs from 1
  static constexpr int kStored = kRescales + 16;                      // StoredPiece [2], by parity of the piece
  static constexpr int kParity = kStored + 2 * sizeof(StoredPiece);   // int: of the piece whose scores are computed
  static constexpr int kBarriers = kParity + 8;                       // 8 bytes each, see below
  static constexpr int kBarrierCount = 2 * kStages + 2 * kBuffers + 3;
  static constexpr int kEntry = kBarriers + 8 * kBarrierCount;  // the part's row of the plan
  static constexpr int kBytes = kEntry + 32;
  static_assert(kBytes <= 227 * 1024 && kEntry % 8 == 0 && kP % 512 == 0);

  // Of a stage: a tile is there; both groups with values are done with it.
  static constexpr int barrier_full(int stage) { return kBarriers + 8 * stage; }
  static constexpr int barrier_empty(int stage) { return kBarriers + 8 * (kStages + stage); }
  // Of a buffer: probabilities are there; both groups with values are done with them.
  static constexpr int barrier_given(int buffer) { return kBarriers + 8 * (2 * kStages + buffer); }
  static constexpr int barrier_taken(int buffer) { return kBarriers + 8 * (2 * kStages + kBuffers + buffer); }
  // Of a piece: half of its queries is there; all that multiply meet, and its totals are there.
  static constexpr int barrier_queries(int half) { return kBarriers + 8 * (kBarrierCount - 3 + half); }
  static constexpr int kTotalsThere = kBarriers + 8 * (kBarrierCount - 1);
  static constexpr int totals(int parity) { return kTotals + parity * 2 * 64 * 4; }
};

// Where the ring of stages stands.
struct Ring {
  int stage = 0;
  uint32_t phase = 0;
  __device__ void advance() {
    if (++stage < Layout::kStages) return;
    stage = 0;
    phase ^= 1;
  }
};

// A hardware barrier, within the groups with values.
inline constexpr int kValueWarps = 1;

}  // namespace attnops::mla_decode::sm90::fp8_products
