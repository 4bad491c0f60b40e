#pragma once
#include "device/sm90/wgmma_rows.cuh"
#include "xqa_decode/cuda/merge.cuh"
#include "xqa_decode/sm90/tickets.cuh"

namespace attnops::xqa_decode::sm90 {

namespace hopper = attnops::sm90;

// What the compiler must know of a kernel. A CTA is one warpgroup, which multiplies tiles of 64 keys with up to kRows
// query rows, and one more warp, which asks the copy engine for the tiles to come. An SM takes up to kMostCtas of them.
// kGathers: two warps copy the tiles instead. kFoldLevels: of the tree in which batch-invariant kernels add up what
// they computed (fold.cuh), so many wait for a sibling, the first in registers; kNoFold in all other kernels.
inline constexpr int kNoFold = -1;

template <typename T_, int kHeadDim_, int kRows_, int kInboxBytes_ = 0, int kMostCtas = 2, bool kGathers_ = false,
          int kFoldLevels_ = kNoFold, typename Element_ = T_>
struct Traits {
  using T = T_;              // of both products
  using Element = Element_;  // of pages
  static constexpr bool kFp8 = sizeof(Element) == 1;
  static constexpr int kHeadDim = kHeadDim_;  // head_dim, rounded up
  static constexpr int kRows = kRows_;        // query rows of a pass over the keys: 8, 16, 32, 64, 128 or 192
  static constexpr int kRowTiles = kRows / 8;

  // Of 128 and 192 rows warpgroups take 64 each, and share the keys.
  static constexpr int kGroups = kRows > 64 ? kRows / 64 : 1;
  static constexpr int kGroupRows = kRows / kGroups;
  static constexpr int kWarps = 4;  // of a group
  static constexpr int kGroupThreads = 32 * kWarps;
  static constexpr int kThreads = kGroups * kGroupThreads;  // that multiply
  // Groups ask for products in turns, so that one computes probabilities while another multiplies. Two groups of head
  // dim 64 gain nothing by it.
  static constexpr bool kTakesTurns = kGroups > (kHeadDim > 64 ? 1 : 2);
  static constexpr int kReaders = kThreads;  // of every unit
  static constexpr bool kGathers = kGathers_;
  // Tiles of e4m3 become fp16 in shared memory, between two rings, by warps of their own (fp8/widening.cuh).
  static constexpr bool kWidens = kFp8 && kRows >= 64, kWidensAhead = kWidens;
  // Groups of wide rows need more registers than there are for all: those that bring tiles give them some. They are
  // then a whole warpgroup, of which some warps may do nothing. So it is with one group where an SM has two such CTAs.
  static constexpr bool kMovesRegisters = kGroups > 1 || (kWidens && kHeadDim <= 128);
  static constexpr int kGroupRegisters = kGroups == 1                 ? 168
                                         : kGroups == 3               ? (kGathers ? 152 : 160)
                                         : kHeadDim <= 128            ? 200
                                         : kWidens && kHeadDim == 192 ? 208
                                                                      : 224;
  static constexpr int kBringerRegisters =
      kGroups == 1 ? 256 - kGroupRegisters : (kGroups == 3 ? 512 : 504) - kGroups * kGroupRegisters;
  static constexpr bool kKeepsQueries = kGroups > 1 && kHeadDim <= (kGroups == 3 ? 64 : 128);  // in registers
  static constexpr int kBringersOfUnit = kGathers && kGroups > 1 && !kWidensAhead ? 2 : 1;     // warps
  static constexpr int kBringers = kGathers ? 2 * kBringersOfUnit : 1;
  static constexpr int kWideners = kWidensAhead ? 4 - kBringers : 0;
  static constexpr int kAllThreads = kThreads + (kMovesRegisters || kWidensAhead ? 128 : 32 * kBringers);
  static constexpr int kTileTokens = 64;
  static constexpr int kBlocks = kHeadDim / 64;  // 64 x 64 blocks of a tile of keys or of values
  // Lines of 128 bytes in a tile's row, of which rows of 64 bytes fill a half.
  static constexpr int kColumns = ceil_div(kHeadDim * (kWidensAhead ? 2 : static_cast<int>(sizeof(Element))), 128);

  // A unit is a tile of keys or of values; units come and go by turns. Probabilities lie in two buffers where there is
  // room, so that a warp may write those of the next tile while another still multiplies.
  static constexpr int kUnitBytes = kColumns * hopper::kTileBytes;
  static constexpr int kQueryBytes = kRows * kHeadDim * 2;
  static constexpr int kProbBytes = kRows * kTileTokens * 2;
  static constexpr int kProbBuffers = kRows <= 32 ? 2 : 0;  // see WideBlock
  static constexpr int kOperandBytes = kProbBuffers * kProbBytes;
  static constexpr int kInboxBytes = kInboxBytes_;  // of what other CTAs of a cluster send
  static constexpr bool kFolds = kFoldLevels_ != kNoFold;
  // Where a pass leaves rows for out: of 16-bit pages where their queries were, else beside the next ones'.
  static constexpr bool kStagesRows = !kFolds && kInboxBytes == 0 && kRows > 8;
  // Of those a group that shares its rows ends each by one thread, and not in every lane that has values of it.
  static constexpr bool kEndsOnce = kStagesRows && kRows <= 32;
  static constexpr int kFactorBytes = kEndsOnce && !kFp8 ? kRows * 4 : 0;
  // The walk over pieces lies in shared memory while a piece is attended and merged: in registers it would be spilled,
  // and so would loads that nobody waits for.
  static constexpr bool kParksWalk =
      !kFolds && kInboxBytes == 0 && (kRows >= 64 || (!kFp8 && kRows == 32 && kHeadDim <= 128));
  static constexpr int kWalkBytes = kFolds || kParksWalk ? 96 * kGroups : 0;
  static constexpr int kExchangeBytes = kWidensAhead ? 0 : kWarps * kRows * 4;
  static constexpr int kSmallBytes = 256 + kExchangeBytes + (kFp8 ? 2 * kRows * 4 : 0) + kWalkBytes + kFactorBytes;
  // The next piece's queries come while this one's tiles are multiplied, where that does not cost a CTA of the SM, or
  // the fourth tile of a ring that others fill. Over e4m3 pages they come as they lie in q, and change their type when
  // the piece begins.
  static constexpr bool kFetchesAhead =
      !kFolds && kInboxBytes == 0 && !kWidensAhead && (kFp8 || kHeadDim <= 128 || (kRows != 16 && kRows <= 64));
  // The merge has its scratch where probabilities lie, or queries that nobody needs any more.
  static constexpr int kScratchBytes =
      max_of(static_cast<int>(sizeof(PartialSum)) * kThreads, kFp8&& kStagesRows ? kQueryBytes : 0);
  static constexpr int kWorkBytes = kFetchesAhead ? 2 * kQueryBytes + max_of(kOperandBytes, kScratchBytes)
                                                  : max_of(kQueryBytes + kOperandBytes, kScratchBytes);
  static constexpr int kFoldLevels = max_of(kFoldLevels_, 0);
  static constexpr int kFoldLevelBytes = (kBlocks * kRows / 2 + 2 * kRowTiles) * 4 * kThreads;
  static constexpr int kFoldBytes = kFolds ? kWarps * kRows * 4 + max_of(kFoldLevels - 1, 0) * kFoldLevelBytes : 0;
  static constexpr int kRestBytes =
      kWorkBytes + kSmallBytes + kInboxBytes + kFoldBytes + (kWidensAhead ? 2 * 96 : 0);  // barriers
  static constexpr int kPartOfSm = (228 - kMostCtas) * 1024 / kMostCtas, kWholeSm = 227 * 1024;
  // Units of e4m3 have a ring of their own, of four places or more.
  static constexpr int kRawUnitBytes = kWidensAhead ? ceil_div(kHeadDim, 128) * (kTileTokens * 128) : 0;
  static constexpr int kLeastRing = 3 * kUnitBytes + 4 * kRawUnitBytes;
  static constexpr int kCtasPerSm = kGroups == 1 && kPartOfSm - kRestBytes >= kLeastRing ? kMostCtas : 1;
  // Splits that a merge loads at a time: more would spill what lives on.
  static constexpr int kMergeBatch = kParksWalk && kRows == 32 ? 8 : 16;
  static constexpr int kRingBytes = (kCtasPerSm > 1 ? kPartOfSm : kWholeSm) - kRestBytes;
  static constexpr int kUnits = min_of((kRingBytes - 4 * kRawUnitBytes) / kUnitBytes, kWidensAhead ? 6 : 12);
  static constexpr int kRawUnits =
      kWidensAhead ? min_of((kRingBytes - kUnits * kUnitBytes) / max_of(kRawUnitBytes, 1), 12) : 0;
  static_assert(kUnits >= 3);
  // Of a long piece parts of the plan ask for no more than four units of 16 KB at a time, measured at head dim 128:
  // with six some CTAs get their tiles sooner at the cost of others, which then end later.
  static constexpr bool kFewOfLong = kInboxBytes == 0 && kCtasPerSm > 1;
  static constexpr int kUnitsOfLong =
      !kFewOfLong ? kUnits : min_of(kFp8 ? 4 : max_of(4 * 16 * 1024 / kUnitBytes, 3), kUnits);

  // fp16 probabilities are scaled up by this power of two, so that small ones keep their digits; with kSlack more they
  // stay in range.
  static constexpr float kProbShift = std::is_same_v<T, __half> ? 6.f : 0.f;

  // Over e4m3 pages, see fp8/.
  static constexpr int kHeads = 1;
  static constexpr bool kHalves = kRows > 8 || kMostCtas > 2 || kHeadDim > 128;
  __device__ static constexpr int query_word(int row, int at) {
    return at / 32 * (kRows * 32) + row * 32 + ((at % 32 / 4) ^ (row & 7)) * 4 + at % 4;
  }
};

// The reference maximum of a row follows the true one only when that is more than 2^kSlack above it: exact all the
// same, since numerator and denominator share the reference, and the accumulators are hardly ever rescaled.
inline constexpr float kSlack = 8.f;

template <class Tr>
constexpr bool widens_ahead() {
  return requires { requires Tr::kWidensAhead; };
}

// What warps know that bring tiles: where those become fp16 on the way, of the ring before that.
template <class Tr>
struct RawTraits : Tr {
  static constexpr bool kWidensAhead = false;
  static constexpr int kUnitBytes = Tr::kRawUnitBytes;
  static constexpr int kColumns = kUnitBytes / (Tr::kTileTokens * 128);
  static constexpr int kUnits = Tr::kRawUnits;
  static constexpr int kUnitsOfLong = Tr::kFewOfLong ? min_of(kUnits, 4) : kUnits;
};

template <class Tr>
using Bringer = std::conditional_t<widens_ahead<Tr>(), RawTraits<Tr>, Tr>;

// Bytes by which works are handed on in a CTA (dealt_works.cuh).
template <class Tr>
constexpr int deal_bytes() {
  return deals_works<Tr>() ? 96 : 0;
}

// Where things lie in shared memory, from a 1 KB boundary.
template <class Tr>
struct SharedLayout {
  static constexpr int kRing = 0;
  static constexpr int kRawRing = Tr::kUnits * Tr::kUnitBytes;
  static constexpr int kQueries = kRawRing + Tr::kRawUnits * Tr::kRawUnitBytes;  // [kBlocks][kRows][64], swizzled
  static constexpr int kProbs =  // [kProbBuffers][kRowTiles][64 keys][8]
      kQueries + (Tr::kFetchesAhead ? 2 : 1) * Tr::kQueryBytes;
  static constexpr int kMergeScratch = Tr::kFetchesAhead ? kProbs : kQueries;
  static constexpr int kFull = kQueries + Tr::kWorkBytes;           // barriers [kUnits]
  static constexpr int kEmpty = kFull + 96;                         // barriers [kUnits]
  static constexpr int kFlag = kFull + 192;                         // MergeFlag
  static constexpr int kNowhere = kFlag + 16;                       // 16 bytes that nobody reads
  static constexpr int kInboxFull = kNowhere + 16;                  // barrier
  static constexpr int kExchange = kFull + 256;                     // float [kWarps][kRows]
  static constexpr int kRowScale = kExchange + Tr::kExchangeBytes;  // over e4m3 pages float [2][kRows]
  static constexpr int kFactors = kRowScale;  // float [kRows] of `end_rows`, over e4m3 pages in place of the scales
  // The walk's state where kernels fold or park it.
  static constexpr int kPiece = kRowScale + (Tr::kFp8 ? 2 * Tr::kRows * 4 : Tr::kFactorBytes);
  static constexpr int kInbox = kPiece + Tr::kWalkBytes;
  static constexpr int kFoldSums = kInbox + Tr::kInboxBytes;                  // float [kWarps][kRows]
  static constexpr int kFold = kFoldSums + Tr::kWarps * Tr::kRows * 4;        // [kFoldLevels - 1], where kernels fold
  static constexpr int kRawFull = kInbox + Tr::kInboxBytes + Tr::kFoldBytes;  // barriers [kRawUnits]
  static constexpr int kRawEmpty = kRawFull + (Tr::kWidensAhead ? 96 : 0);    // barriers [kRawUnits]
  static constexpr int kDeal = kRawEmpty + (Tr::kWidensAhead ? 96 : 0);       // DealtWalk's, in kernels that have one
  static constexpr int kBytes = kDeal + deal_bytes<Tr>();
  static_assert(kBytes <= (deal_bytes<Tr>() > 0 ? Tr::kPartOfSm : kBytes));
};
template <class Tr>
struct SharedLayout<RawTraits<Tr>> {
  static constexpr int kRing = SharedLayout<Tr>::kRawRing;
  static constexpr int kFull = SharedLayout<Tr>::kRawFull;
  static constexpr int kEmpty = SharedLayout<Tr>::kRawEmpty;
};

// Barriers of the hardware; 0 is for all threads that multiply, and the merge. kMultiply and those behind it are for
// one group each, kTurn and those behind it for the turns of each, kMerge for two groups of three.
enum NamedBarrier : int { kMultiply = 1, kTurn = 4, kMerge = 7 };

// What a launch knows besides the arguments and the shape.
struct Boxes {
  int tokens;         // of a box of the copy engine: min(page_size, 64)
  int bytes;          // of a box
  int runs;           // of box tokens in a tile
  int count;          // of boxes in a unit
  int units_of_long;  // on their way at a time, of a long piece
  int row_blocks;     // of a work, a CTA each; 1: a CTA passes over the keys for one block after the other
  // Rows of q, and of out, start on 16-byte boundaries, head_dim is a multiple of 8, and from one row of a request to
  // another it is a number of 32 bits. Strides in elements, where that is so.
  bool vector_queries, vector_out;
  int q_token, q_head, out_token, out_head;
};

}  // namespace attnops::xqa_decode::sm90
