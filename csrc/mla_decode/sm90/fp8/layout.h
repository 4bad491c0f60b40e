#pragma once
#include "mla_decode/sm90/layout.h"

// Shared memory of the kernels that convert FP8 caches to 16 bit on their way in. Queries and KV tiles lie as those of
// the 16-bit kernel do; a tile comes and goes in three parts: rope, left half, right half.
namespace attnops::mla_decode::sm90::fp8 {

inline constexpr int kQ = 0;
inline constexpr int kKv = kOperandBytes;  // two buffers: even and odd KV tiles of a piece
inline constexpr int kP0 = 3 * kOperandBytes;
inline constexpr int kP1 = kQ + kRopeTile * kTileBytes;  // of odd tiles: q's rope part is in registers by then
inline constexpr int kMaxima = kP0 + kTileBytes;         // float [2][64], by parity of the tile
inline constexpr int kSums = kMaxima + 2 * 64 * 4;       // float [2][2][64], by parity of the piece, group
inline constexpr int kBarriers = kSums + 2 * 2 * 64 * 4;
inline constexpr int kBarrierCount = 2 * (3 + 3) + 2;  // per buffer: full, empty; q full, q empty
inline constexpr int kSharedBytes = kBarriers + 8 * kBarrierCount;
static_assert(kSharedBytes <= 227 * 1024);

inline constexpr int kLoaderWarps = kGroupThreads / 32;
// A CTA never has more registers than its launch took: 168 per thread.
inline constexpr int kConsumerRegisters = 224;
inline constexpr int kLoaderRegisters = 56;
static_assert(2 * kConsumerRegisters + kLoaderRegisters <= 3 * 168);

inline constexpr int barrier_full(int buffer, int part) { return kBarriers + 8 * (buffer * kParts + part); }
inline constexpr int barrier_empty(int buffer, int part) { return kBarriers + 8 * (6 + buffer * kParts + part); }
inline constexpr int kQueriesFull = kBarriers + 8 * 12;
inline constexpr int kQueriesEmpty = kBarriers + 8 * 13;

}  // namespace attnops::mla_decode::sm90::fp8
