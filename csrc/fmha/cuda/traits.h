#pragma once
#include "core/math.h"

namespace attnops::fmha {

// Where rows of keys and values are.
enum class Source : int {
  kInRow,     // 16-bit rows; those of a tile follow each other, by the pools' token strides
  kGathered,  // 16-bit rows on 16 bytes, each anywhere
  kAny,       // FP8 rows, and rows that start anywhere
};

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
  static constexpr bool kMergesTogether = false, kPlainWorks = false;
  static_assert(kHeadDimQk % 16 == 0 && kHeadDimV % 16 == 0 && kKeys % 16 == 0 && 2 * kKeys <= kThreads);

  // A chunk: 64 columns of a tile, rows of 128 bytes whose pieces of 16 bytes are swizzled.
  static constexpr int kMostStages = kHeadDimQk <= 128 ? 2 : 1;
  static constexpr int kQkChunks = ceil_div(kHeadDimQk, 64), kVChunks = ceil_div(kHeadDimV, 64);
  static constexpr int kQBytes = kQkChunks * kRows * 128;
  static constexpr int kKBytes = kQkChunks * kKeys * 128, kVBytes = kVChunks * kKeys * 128;
  static_assert(kVChunks <= kQkChunks, "results leave through the queries' place");
};

// Offsets in bytes. A stage holds keys and values of a tile. FP8 rows land behind the stages, from which each thread
// converts what it has copied.
template <class Tr>
struct SharedLayout {
  static constexpr int kQ = 0;
  static constexpr int kPlaces = kQ + Tr::kQBytes;
  static constexpr int kWork = kPlaces + 2 * Tr::kKeys * 16;  // behind Places<kKeys>
  static constexpr int kWorkBytes = 256;                      // WorkQueue
  static constexpr int kStages = kWork + kWorkBytes;          // 1 or 2
  static constexpr int kStageBytes = Tr::kKBytes + Tr::kVBytes;
  static constexpr int kK = kStages, kV = kK + Tr::kKBytes;  // of the first stage
  static_assert(kStages % 128 == 0);

  // Of calls with one stage alone.
  static constexpr int kRawK = kStages + kStageBytes, kRawV = kRawK + Tr::kKBytes / 2;
  static constexpr int bytes(int stages, bool raw) {
    return raw ? kRawV + Tr::kVBytes / 2 : kStages + stages * kStageBytes;
  }
};

}  // namespace attnops::fmha
