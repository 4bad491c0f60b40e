#pragma once
#include "xqa_decode/sm90/traits.cuh"

namespace attnops::xqa_decode::sm90 {
namespace fp8 {

// What the compiler must know of a kernel over e4m3 pages. A CTA is two warpgroups, which multiply tiles of 64 keys by
// turns, each with all query rows, and one more warp, which asks the copy engine for the tiles to come. kGathers: two
// warps copy them instead. kHeads 2: the same twice, but for the one more warp, for two neighbouring KV heads. Their
// rows of 128 bytes are then read together, and a ring that is twice as deep does not let them drift apart.
template <int kRows_, bool kGathers_, int kUnits_ = 8, int kHeads_ = 1>
struct Traits {
  using T = __half;         // of both products: it holds every e4m3 value
  using Element = uint8_t;  // of pages
  static constexpr bool kFp8 = true;
  static constexpr bool kFolds = false;
  static constexpr bool kMayCut = false;  // batch-invariant plans have kernels that fold
  static constexpr int kHeadDim = 128;
  static constexpr int kRows = kRows_;  // query rows: 8 or 16
  static constexpr int kRowTiles = kRows / 8;

  static constexpr bool kHalves = kRows > 8;  // a product takes its operand from registers in two halves: fewer of them
  static constexpr int kGroups = 2;
  static constexpr int kWarps = 4;  // of a group
  static constexpr int kGroupThreads = 32 * kWarps;
  static constexpr int kThreads = kGroups * kGroupThreads;  // that multiply, for one KV head
  static constexpr int kReaders = kGroupThreads;            // of every unit
  static constexpr int kHeads = kHeads_;
  static constexpr int kBringersOfUnit = 1;
  static constexpr bool kGathers = kGathers_;
  static constexpr int kAllThreads = kHeads * kThreads + (kGathers ? 64 : 32);
  static constexpr int kTileTokens = 64;
  static constexpr int kColumns = 1;  // columns of boxes in a tile: a row is one line of 128 bytes

  static constexpr int kUnitBytes = hopper::kTileBytes;  // a tile of keys or of values
  static constexpr int kQueryBytes = kRows * kHeadDim * 2;
  static constexpr int kProbBytes = kRows * kTileTokens * 2;
  static constexpr int kProbBuffers = 2;  // a warp may write the next tile's while another still multiplies
  static constexpr int kSwapBytes = kThreads * max_of(kRows * 2, static_cast<int>(sizeof(PartialSum)));
  static constexpr int kSmallBytes = 256 + 2 * kRows * 4 + kThreads / 32 * kRows * 4 + kGroups * kRows * 4 + 160;
  static constexpr int kRestBytes = 2 * kQueryBytes + kGroups * kProbBuffers * kProbBytes + kSwapBytes + kSmallBytes;
  static constexpr int kCtasPerSm = 2 / kHeads;
  // A place in the ring always serves the same group, which then sees all phases of its barriers: else it could take
  // the phase before last for the one that it waits for. Two tiles of a long piece are enough: with more on their way,
  // CTAs that read neighbouring heads drift apart, and DRAM gives 1 to 4 % less. The next of many short pieces should
  // be there when it begins.
  static constexpr int kUnits = kUnits_;
  static constexpr int kUnitsOfLong = kHeads == 1 ? 4 : kUnits;
  static_assert(kUnits % 4 == 0);
  static_assert(kUnits * kUnitBytes + kRestBytes <= (228 * 1024 - 2 * 1024) / 2);

  // fp16 probabilities are scaled up by this power of two, so that small ones keep their digits; with kSlack more they
  // stay in range.
  static constexpr float kProbShift = 6.f;

  // Where a row's 32-bit pair `at` lies among the queries: [2][kRows][64], swizzled.
  __device__ static constexpr int query_word(int row, int at) {
    return at / 32 * (kRows * 32) + row * 32 + ((at % 32 / 4) ^ (row & 7)) * 4 + at % 4;
  }
};

// Of all threads that multiply for a head; of a group: kOwn + its number. Four more for every further head.
enum NamedBarrier : int { kAll = 1, kOwn = 2 };

}  // namespace fp8

// Where things lie in shared memory, from a 1 KB boundary.
template <int kRows, bool kGathers, int kUnits, int kHeads>
struct SharedLayout<fp8::Traits<kRows, kGathers, kUnits, kHeads>> {
  using Tr = fp8::Traits<kRows, kGathers, kUnits, kHeads>;
  static constexpr int kRing = 0;
  static constexpr int kQueries = Tr::kUnits * Tr::kUnitBytes;
  static constexpr int kProbs = kQueries + Tr::kQueryBytes;  // [kGroups][kProbBuffers][kRowTiles][64 keys][8]
  // What a group found of the columns that the other one stores: float [kGroups][kRows / 2][kGroupThreads]. Also the
  // merge's scratch.
  static constexpr int kSwap = kProbs + Tr::kGroups * Tr::kProbBuffers * Tr::kProbBytes;
  static constexpr int kNextQueries = kSwap + Tr::kSwapBytes;   // 16-bit [kRows][kHeadDim], as they lie in q
  static constexpr int kFull = kNextQueries + Tr::kQueryBytes;  // barriers [kUnits]
  static constexpr int kEmpty = kFull + 96;                     // barriers [kUnits]
  static constexpr int kFlag = kFull + 192;                     // MergeFlag
  static constexpr int kNowhere = kFlag + 16;                   // 16 bytes that nobody reads
  static constexpr int kRowScale = kFull + 256;                 // float [kRows]
  static constexpr int kScale = kRowScale + kRows * 4;          // float [kRows]: see Consumer::open
  static constexpr int kExchange = kScale + kRows * 4;          // float [kGroups][kWarps][kRows]
  static constexpr int kReferences = kExchange + Tr::kThreads / 32 * kRows * 4;  // float [kGroups][kRows]
  static constexpr int kEdges = kReferences + Tr::kGroups * kRows * 4;           // fp8::Edges
  static constexpr int kPiece = kEdges + 32;                                     // the state of the walk over pieces
  static constexpr int kPlace = kPiece + 112;                                    // fp8::TilePlace
  static constexpr int kOfHead = (kPlace + 16 + 1023) / 1024 * 1024;             // all of the above, once per head
  static constexpr int kBytes = Tr::kHeads == 1 ? kPlace + 16 : Tr::kHeads * kOfHead;
};

}  // namespace attnops::xqa_decode::sm90
