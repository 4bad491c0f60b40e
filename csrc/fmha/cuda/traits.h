#pragma once
#include "core/math.h"

namespace attnops::fmha {

// Tiles and shared memory of one instantiation. Head dims are those of the tile; smaller ones are filled with zeros.
//
// A CTA has kWarps warps of 16 * kBlocks query rows each; all of them bring keys and values. A row is a query token and
// one head of a group: kRows / pack tokens times `pack` heads of one KV head share a tile of keys. Two blocks of rows a
// warp use what it reads of a key twice: with one, shared memory is slower than the matrix units.
template <typename T_, int kHeadDimQk_, int kHeadDimV_, int kKeys_, int kBlocks_, int kWarps_>
struct Traits {
  using T = T_;
  static constexpr int kHeadDimQk = kHeadDimQk_, kHeadDimV = kHeadDimV_;
  static constexpr int kKeys = kKeys_;  // of a tile
  static constexpr int kBlocks = kBlocks_, kWarps = kWarps_;
  static constexpr int kWarpRows = 16 * kBlocks, kRows = kWarpRows * kWarps;
  static constexpr int kThreads = 32 * kWarps;
  static constexpr int kCtasPerSm = 2;  // one computes exponentials while the other multiplies
  // As the merge of pieces asks (fmha/sm90/merge.cuh).
  using Out = T;
  static constexpr int kComputeWarps = kWarps, kFirstComputeWarp = 0;
  static constexpr bool kMergesTogether = false;
  static_assert(kHeadDimQk % 16 == 0 && kHeadDimV % 16 == 0 && kKeys % 16 == 0 && 2 * kKeys <= kThreads);

  // A chunk: 64 columns of a tile, rows of 128 bytes whose pieces of 16 bytes are swizzled.
  static constexpr int kQkChunks = ceil_div(kHeadDimQk, 64), kVChunks = ceil_div(kHeadDimV, 64);
  static constexpr int kQBytes = kQkChunks * kRows * 128;
  static constexpr int kKBytes = kQkChunks * kKeys * 128, kVBytes = kVChunks * kKeys * 128;
  static_assert(kVChunks <= kQkChunks, "results leave through the queries' place");
};

// Offsets in bytes. FP8 rows land in a place of their own, from which each thread converts what it has copied.
template <class Tr>
struct SharedLayout {
  static constexpr int kQ = 0;
  static constexpr int kPlaces = kQ + Tr::kQBytes;
  static constexpr int kWork = kPlaces + 2 * Tr::kKeys * 16;  // behind Places<kKeys>
  static constexpr int kWorkBytes = 256;                      // WorkQueue
  static constexpr int kV = kWork + kWorkBytes;
  static constexpr int kK = kV + Tr::kVBytes;  // 1 or 2 stages
  static_assert(kV % 128 == 0);

  static constexpr int raw_k(int k_stages) { return kK + k_stages * Tr::kKBytes; }
  static constexpr int raw_v(int k_stages) { return raw_k(k_stages) + Tr::kKBytes / 2; }
  static constexpr int bytes(int k_stages, bool raw) {
    return raw ? raw_v(k_stages) + Tr::kVBytes / 2 : raw_k(k_stages);
  }
};

}  // namespace attnops::fmha
