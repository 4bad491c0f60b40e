#pragma once
#include "mla_decode/sm90/layout.h"

// Shared memory of the kernel that multiplies e4m3 as it lies. Operands are tiles of 64 rows of 128 bytes, 8 KB each,
// under the 128-byte swizzle: four for the latent, and one for the rope part, of which half is used.
namespace attnops::mla_decode::sm90::fp8_products {

inline constexpr int kLatentTiles = kHeadDimV / 128;
inline constexpr int kKeyTiles = kLatentTiles + 1;
inline constexpr int kStageBytes = kKeyTiles * kTileBytes;

struct Layout {
  static constexpr int kStages = 4;
  static constexpr int kQ = 0;
  static constexpr int kKv = kKeyTiles * kTileBytes;
  static constexpr int kP = kKv + kStages * kStageBytes;  // even tiles, by parity of the pair; odd tiles
  static constexpr int kFactors = kP + 3 * kTileBytes;    // float [3][64], as P: what the tile rescales outputs by
  static constexpr int kMaxima = kFactors + 3 * 64 * 4;   // float [2][64], by parity of the tile
  static constexpr int kSums = kMaxima + 2 * 64 * 4;      // float [2][64], by group
  static constexpr int kQueryScale = kSums + 2 * 64 * 4;  // float [64]
  static constexpr int kRescales = kQueryScale + 64 * 4;  // int [3], as P: whether a factor differs from 1
  static constexpr int kBarriers = kRescales + 16;        // 8 bytes each: per stage boxes, gather, empty
  static constexpr int kBytes = kBarriers + 8 * 3 * kStages;
  static_assert(kBytes <= 227 * 1024);

  static constexpr int barrier_box(int stage) { return kBarriers + 8 * stage; }
  static constexpr int barrier_gather(int stage) { return kBarriers + 8 * (kStages + stage); }
  static constexpr int barrier_empty(int stage) { return kBarriers + 8 * (2 * kStages + stage); }
};

// A CTA never has more registers than its launch took: 168 per thread.
inline constexpr int kConsumerRegisters = 232;
inline constexpr int kLoaderRegisters = 40;
static_assert(2 * kConsumerRegisters + kLoaderRegisters <= 3 * 168);

// Hardware barriers between the consumer groups: maxima of an even tile published; probabilities of an even or odd tile
// ready; all consumers; and within one group.
enum Barrier : int { kMaximum0 = 1, kReady0 = 2, kReady1 = 3, kConsumers = 4, kOwn0 = 5, kOwn1 = 6 };

}  // namespace attnops::mla_decode::sm90::fp8_products
