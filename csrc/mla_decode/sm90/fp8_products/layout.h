#pragma once
#include "mla_decode/params.h"
#include "mla_decode/sm90/layout.h"

// Shared memory of the kernel that multiplies e4m3 as it lies. Operands are four tiles of 64 rows of 128 bytes for the
// latent, 8 KB each under the 128-byte swizzle, and 64 rows of 64 bytes for the rope part, under the 64-byte swizzle.
namespace attnops::mla_decode::sm90::fp8_products {

inline constexpr int kLatentTiles = kHeadDimV / 128;
inline constexpr int kRope = kLatentTiles * kTileBytes;  // offset of the rope part
inline constexpr int kStageBytes = kRope + 64 * 64;

// Of the rope part: 16-byte chunk 0 .. 3 of a row.
__device__ inline int swizzled_half(int row, int chunk) { return row * 64 + ((chunk ^ (row / 2 & 3)) << 4); }

// The probabilities of a tile take the place of its own rope part, which is 64 x 64 bytes, too.
struct Layout {
  static constexpr int kStages = 5;
  static constexpr int kQ = 0;
  static constexpr int kKv = kStageBytes;
  static constexpr int kFactors = kKv + kStages * kStageBytes;  // float [3][64]: what a tile rescales outputs by
  static constexpr int kMaxima = kFactors + 3 * 64 * 4;         // float [2][64], by parity of the tile
  static constexpr int kSums = kMaxima + 2 * 64 * 4;            // float [2][64], by group
  static constexpr int kReference = kSums + 2 * 64 * 4;         // float [64], at the end of a piece
  static constexpr int kQueryScale = kReference + 64 * 4;       // float [64]
  static constexpr int kEnds = kQueryScale + 64 * 4;            // TransposedEnds
  static constexpr int kRescales = kEnds + 64 * 16;             // int [3], as factors: whether one differs from 1
  static constexpr int kBarriers = kRescales + 16;              // 8 bytes each, see below
  static constexpr int kBarrierCount = 2 * kStages + 3;
  static constexpr int kEntry = kBarriers + 8 * (kBarrierCount + 1);  // the part's row of the plan
  static constexpr int kBytes = kEntry + 32;
  static_assert(kBytes <= 227 * 1024 && kEntry % 8 == 0);

  // Of a stage: a tile is there; both groups are done with it.
  static constexpr int barrier_full(int stage) { return kBarriers + 8 * stage; }
  static constexpr int barrier_empty(int stage) { return kBarriers + 8 * (kStages + stage); }
  // Probabilities of the even or odd tile of a pair; maxima of the even one.
  static constexpr int barrier_ready(int parity) { return kBarriers + 8 * (2 * kStages + parity); }
  static constexpr int kMaximaReady = kBarriers + 8 * (2 * kStages + 2);
};

// A CTA never has more registers than its launch took: 168 per thread.
inline constexpr int kConsumerRegisters = 232;
inline constexpr int kLoaderRegisters = 40;
static_assert(2 * kConsumerRegisters + kLoaderRegisters <= 3 * 168);

// Hardware barriers: all consumers, and within a group (kOwn + group).
enum Barrier : int { kConsumers = 1, kOwn = 2 };

}  // namespace attnops::mla_decode::sm90::fp8_products
