#pragma once
#include <cstdint>

#include "mla_decode/plan.h"
#include "mla_decode/selected.h"

namespace attnops::mla_decode::sm90 {

inline constexpr int kGroupThreads = 128;
inline constexpr int kConsumerThreads = 2 * kGroupThreads;
inline constexpr int kThreads = 3 * kGroupThreads;  // two warpgroups that multiply, one that loads

// Rows of q, K and V lie in shared memory as tiles of 64 x 64 elements, 8 KB each (device/sm90/wgmma.cuh).
inline constexpr int kTileBytes = 64 * 128;
inline constexpr int kTilesQk = 9;  // 576 / 64; the last is the rope part
inline constexpr int kTilesV = 8;
inline constexpr int kRopeTile = 8;
inline constexpr int kOperandBytes = kTilesQk * kTileBytes;

// Shared memory, in bytes from a 1 KB boundary. The probabilities of odd tiles take the place of q's rope part, which
// both groups hold in registers by then.
inline constexpr int kQ = 0;
inline constexpr int kKv = kOperandBytes;  // two buffers: even and odd KV tiles of a piece
inline constexpr int kP0 = 3 * kOperandBytes;
inline constexpr int kP1 = kQ + kRopeTile * kTileBytes;
inline constexpr int kMaxima = kP0 + kTileBytes;              // float [2][64], by parity of the tile
inline constexpr int kSums = kMaxima + 2 * 64 * 4;            // float [2][2][64], by parity of the piece, group
inline constexpr int kBarriers = kSums + 2 * 2 * 64 * 4;      // 8 bytes each, see below
inline constexpr int kBarrierCount = 2 * (5 + 3) + 2 + 5;     // per buffer: full, empty; q full, q empty; below
inline constexpr int kEntry = kBarriers + 8 * kBarrierCount;  // the part's row of the plan
// Where the rows of gathered tiles lie: uint32 [4][32], by loading warp.
inline constexpr int kRowLists = (kEntry + 32 + 15) / 16 * 16;
inline constexpr int kAsked = kRowLists + 4 * 32 * 4;  // int: what the part has asked for before its loaders begin
inline constexpr int kKeyMasks = kAsked + 16;          // uint64 [2], by buffer: which keys of a list there are
inline constexpr int kTops = kKeyMasks + 16;           // float [2][64], by parity of the piece: group 1's, of lists
inline constexpr int kHeadMasks = kTops + 2 * 64 * 4;  // uint64 [2][kMostHeadGroups], by buffer: who sees which keys
// A barrier: of lists, whose other queries are given back earlier.
inline constexpr int kQueriesRopeEmpty = kHeadMasks + 2 * kMostHeadGroups * 8;
inline constexpr int kSharedBytes = kQueriesRopeEmpty + 8;
static_assert(kSharedBytes <= 227 * 1024);

// A KV tile arrives in five units and is given back in three.
enum Unit : int {
  kRope = 0,
  kLeft0 = 1,
  kLeft1 = 2,
  kRight0 = 3,
  kRight1 = 4,
  kUnits = 5
};  // rope, 2 x 2 tiles, 2 x 2
enum Part : int { kPartRope = 0, kPartLeft = 1, kPartRight = 2, kParts = 3 };

inline constexpr int first_tile_of_part(int part) { return part == kPartRope ? kRopeTile : 4 * (part - 1); }
inline constexpr int tiles_of_unit(int unit) { return unit == kRope ? 1 : 2; }

inline constexpr int kFullArrivals = 64;  // of a unit: by every lane of a buffer's two warps, or by one for all

// Byte offsets of the barriers.
inline constexpr int barrier_full(int buffer, int unit) { return kBarriers + 8 * (buffer * kUnits + unit); }
inline constexpr int barrier_empty(int buffer, int part) { return kBarriers + 8 * (10 + buffer * kParts + part); }
inline constexpr int kQueriesFull = kBarriers + 8 * 16;
inline constexpr int kQueriesEmpty = kBarriers + 8 * 17;
inline constexpr int kProbabilities1 = kBarriers + 8 * 18;  // those of an odd tile are there
inline constexpr int kRowsStored = kBarriers + 8 * 19;      // by group 1: of a piece
inline constexpr int kRowSums = kBarriers + 8 * 20;         // of a piece, by both groups
inline constexpr int barrier_cleared(int group) { return kBarriers + 8 * (21 + group); }  // by a group, of its values

// Hardware barriers, where group 1 waits for group 0: probabilities of an even tile are there; its scores are issued.
// Where group 0 waits, or both do, it is at barriers in memory: compute-sanitizer's racecheck takes a warp that has
// passed more hardware barriers than another for behind it. And: the loading warps of even tiles have asked for the
// first.
enum NamedBarrier : int { kProbabilities0 = 1, kScores0 = 2, kFirstTile = 3, kAskedKnown = 4 };

}  // namespace attnops::mla_decode::sm90
