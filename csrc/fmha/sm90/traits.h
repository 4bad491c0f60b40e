#pragma once
#include "core/math.h"

namespace attnops::fmha::sm90 {

// Tiles and shared memory of one instantiation. Head dims are those of the tile; smaller ones are filled with zeros.
//
// A CTA is one warpgroup that brings tiles and kWarpgroups that compute, 64 rows each. A row is a query token and one
// head of a group: kRows / pack tokens times `pack` heads of one KV head share a tile of keys.
template <typename T_, int kHeadDimQk_, int kHeadDimV_, int kKeys_, int kWarpgroups_, int kQStages_, int kStages_,
          int kConsumerRegisters_>
struct Traits {
  using T = T_;
  static constexpr int kHeadDimQk = kHeadDimQk_, kHeadDimV = kHeadDimV_;
  static constexpr int kKeys = kKeys_;  // of a tile
  static constexpr int kWarpgroups = kWarpgroups_;
  static constexpr int kRows = 64 * kWarpgroups;
  static constexpr int kQStages = kQStages_, kStages = kStages_;
  static constexpr int kThreads = 128 * (kWarpgroups + 1);
  static constexpr int kConsumerRegisters = kConsumerRegisters_;
  // Warpgroups start with equal shares and may trade what they were given together.
  static constexpr int kProducerRegisters =
      65536 / kThreads / 8 * 8 * (kWarpgroups + 1) - kWarpgroups * kConsumerRegisters;
  static_assert(kProducerRegisters >= 24);

  // A chunk: 64 columns of a tile, rows of 128 bytes under the 128-byte swizzle.
  static constexpr int kQkChunks = ceil_div(kHeadDimQk, 64), kVChunks = ceil_div(kHeadDimV, 64);
  static constexpr int kQBytes = kQkChunks * kRows * 128;
  static constexpr int kKBytes = kQkChunks * kKeys * 128, kVBytes = kVChunks * kKeys * 128;
};

struct WorkSlot;

// Offsets in bytes from a base on 1 KB.
template <class Tr>
struct SharedLayout {
  static constexpr int kQ = 0;
  static constexpr int kK = kQ + Tr::kQStages * Tr::kQBytes;
  static constexpr int kV = kK + Tr::kStages * Tr::kKBytes;
  static constexpr int kPlaces = kV + Tr::kStages * Tr::kVBytes;  // int2 [kPlaceTiles][kKeys]: page, token of a key
  static constexpr int kPlaceTiles = 3;
  static constexpr int kWorks = kPlaces + kPlaceTiles * Tr::kKeys * 8;  // Work [kQStages]
  static constexpr int kWorkBytes = 64;
  static constexpr int kBarriers = kWorks + Tr::kQStages * kWorkBytes;
  // q full, q empty, k full, k empty, v full, v empty.
  static constexpr int kNumBarriers = 2 * Tr::kQStages + 4 * Tr::kStages;
  static constexpr int kBytes = kBarriers + 8 * kNumBarriers;
  static constexpr int kAllBytes = kBytes + 1008;  // the base, on 16 bytes, is rounded up
  static_assert(kAllBytes <= 227 * 1024, "an SM has 227 KiB for a CTA");

  static constexpr int kQFull = kBarriers, kQEmpty = kQFull + 8 * Tr::kQStages;
  static constexpr int kKFull = kQEmpty + 8 * Tr::kQStages, kKEmpty = kKFull + 8 * Tr::kStages;
  static constexpr int kVFull = kKEmpty + 8 * Tr::kStages, kVEmpty = kVFull + 8 * Tr::kStages;
};

}  // namespace attnops::fmha::sm90
