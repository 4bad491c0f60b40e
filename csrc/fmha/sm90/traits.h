#pragma once
#include <cuda_bf16.h>
#include <cuda_fp8.h>

#include <type_traits>

#include "core/math.h"

namespace attnops::fmha::sm90 {

// How one instantiation divides its work: by measurement, see docs/log/fmha_sm90.md.
struct Shape {
  int head_dim_qk, head_dim_v;
  int keys;                    // of a tile
  int warpgroups;              // that compute
  int q_stages, stages;        // of queries; of keys, and of values
  int registers;               // of a thread that computes
  bool overlap = true;         // the softmax of a tile runs under the values of the tile before
  bool largest_first = false;  // a tile looks for the largest score of each row before it knows of exponents
  bool turns = true;           // warpgroups issue their products one after another
  int ctas = 1;                // that share an SM
  bool one_tile = false;       // works of one tile have a path of their own, and are told of several at once
  bool whole_rows = false;     // boxes have eight keys, with all of their columns
  bool lone = false;           // for short calls, one CTA an SM: threads have all registers that there may be
  bool plain = false;          // for calls without cap, tree mask and hidden keys: less machine code
};

// What tiles may take of an SM's shared memory, divided among its CTAs: it keeps 1 KiB for each, the base is rounded up
// to another, and works and barriers take the rest.
constexpr int most_tile_bytes(int ctas) { return 228 * 1024 / ctas - 1024 - 1008 - 512; }

// The places of a tile of queries, and of keys and values, all of 16 bits, and one of a tile as e4m3.
constexpr int chunks_of(int head_dim) { return ceil_div(head_dim, 64); }
constexpr int wide_tile_bytes(const Shape& s) {
  return s.q_stages * chunks_of(s.head_dim_qk) * 64 * s.warpgroups * 128 +
         s.stages * (chunks_of(s.head_dim_qk) + chunks_of(s.head_dim_v)) * s.keys * 128;
}
constexpr int narrow_tile_bytes(const Shape& s) {
  return max_of(chunks_of(s.head_dim_qk), chunks_of(s.head_dim_v)) * s.keys * 64;
}

// Beside a softmax under values of head dim 256, 40 registers are left to who brings tiles. Boxes need no more; rows,
// and works that are told of together, take 56.
constexpr Shape with_registers_for_bringing(Shape s) {
  if (s.head_dim_v <= 192 || s.lone) return s;
  s.overlap = false;
  s.registers = min_of(s.registers, 224);
  return s;
}

// For e4m3 keys: as many of them as leave room for two tiles as they come. Who brings them needs some 70 registers.
constexpr Shape of_narrow(Shape s) {
  if (s.warpgroups == 3) {  // by measurement
    s.keys = 128;
    s.stages = 2;
    s.overlap = false;
    s.largest_first = true;
  }
  s.registers = min_of(s.registers, 216);
  while (s.keys > 16 && wide_tile_bytes(s) + 2 * narrow_tile_bytes(s) > most_tile_bytes(s.ctas)) s.keys -= 16;
  return s;
}

// For keys and values that come row by row: a third stage of each, where it fits. Copies of rows take longer than
// boxes, so those of a tile must begin earlier. Queries then have one place. Plain kernels need fewer registers, so who
// copies has those that it needs. e4m3 rows that become wide have a place of their own beside them: 32 of a tile have a
// part for each warp.
constexpr Shape of_rows(Shape s, bool narrow) {
  s = with_registers_for_bringing(s);
  if (narrow) s.keys -= s.keys % 32;
  if (narrow || s.ctas > 1 || s.lone) return s;
  if (s.plain) s.registers -= 8;
  if (s.warpgroups == 3) {
    s.stages = 6;
    return s;
  }
  Shape more = s;
  more.stages = 3;
  if (wide_tile_bytes(more) > most_tile_bytes(s.ctas)) more.q_stages = 1;
  return wide_tile_bytes(more) > most_tile_bytes(s.ctas) ? s : more;
}

// For calls whose works have one tile as a rule. Works of more pay for it: it is more machine code.
constexpr Shape of_one_tile(Shape s) {
  s.one_tile = true;
  s.plain = true;
  return with_registers_for_bringing(s);
}

// For boxes of eight keys over small pages: one box in place of one for each chunk.
constexpr Shape of_whole_rows(Shape s) {
  s.whole_rows = true;
  return s;
}

constexpr Shape of_plain(Shape s) {
  s.plain = true;
  return s;
}

// Tiles and shared memory of one instantiation. Head dims are those of the tile; smaller ones are filled with zeros.
//
// A CTA is one warpgroup that brings tiles and kWarpgroups that compute, 64 rows each. A row is a query token and one
// head of a group: kRows / pack tokens times `pack` heads of one KV head share a tile of keys.
//
// Where T is e4m3, values are brought as they are, and two other warps transpose them: the matrix units take 8-bit
// operands along the summed dimension alone.
//
// kNarrow: e4m3 keys and values come in boxes and become fp16 on their way. All products are fp16 then. So queries of
// another type (Caller) become fp16 as well, each row scaled by a power of two.
template <typename T_, Shape kShape_, typename Caller_ = T_, bool kNarrow_ = false>
struct Traits {
  using T = T_;            // of both products
  using Caller = Caller_;  // of queries
  static constexpr bool kNarrow = kNarrow_, kFp8 = std::is_same_v<T, __nv_fp8_e4m3>;
  using Out = std::conditional_t<kFp8, __nv_bfloat16, Caller>;
  using Narrow = Traits<__half, of_narrow(kShape_), Caller, true>;  // for e4m3 keys
  using Rows = Traits<T, kFp8 ? kShape_ : of_rows(kShape_, kNarrow_), Caller, kNarrow_>;
  using OneTile = Traits<T, of_one_tile(kShape_), Caller>;
  using WholeRows = Traits<T, of_whole_rows(kShape_), Caller>;
  using Plain = Traits<T, of_plain(kShape_), Caller, kNarrow_>;
  static constexpr Shape kShape = kShape_;
  static constexpr int kHeadDimQk = kShape.head_dim_qk, kHeadDimV = kShape.head_dim_v;
  static constexpr int kKeys = kShape.keys;
  static constexpr int kWarpgroups = kShape.warpgroups;
  static constexpr int kRows = 64 * kWarpgroups;
  static constexpr int kQStages = kShape.q_stages, kStages = kShape.stages;
  static constexpr int kWorkStages = 2;  // a work is known before its queries have a place
  static constexpr int kThreads = 128 * (kWarpgroups + 1);
  static constexpr int kComputeWarps = 4 * kWarpgroups, kFirstComputeWarp = 4;
  // Beside three warpgroups, or the softmax of wide tiles, it would take registers from the main loop.
  static constexpr bool kMergesTogether = kWarpgroups < 3 && !kNarrow;
  // In boxes, CTAs take the next work late. By measurement: e4m3 and head dim 64 lose by it.
  static constexpr bool kTakesLate = !kFp8 && !kNarrow && kWarpgroups == 2;
  static constexpr bool kShort = kShape.ctas > 1 || kShape.lone;  // for short calls
  static constexpr bool kTradesRegisters = !kShape.lone;
  static constexpr bool kWidensRows = kShape.ctas > 1;  // e4m3 ones, in their place
  // Keys of a tile that are multiplied where a work has no more than these; 0: works of one tile have no path.
  static constexpr int kFewKeys = kShape.one_tile ? ceil_div(kKeys / 2, 16) * 16 : 0;
  // Works that a CTA takes and decodes at once, where they are short.
  static constexpr int kTogether = kShape.one_tile && kTakesLate ? 4 : 1;
  // Beside three warpgroups that path would take rings of the main loop out of uniform registers.
  static constexpr bool kHasOneTile = !kFp8 && !kNarrow && kWarpgroups < 3 && !kShape.one_tile;
  // Plain calls alone have that form. So works are decoded without what others need, and boxes of ragged keys asked for
  // without what pages need.
  static constexpr bool kPlainWorks = kShape.one_tile;
  static constexpr bool kWholeRows = kShape.whole_rows;
  static constexpr bool kHasWholeRows = !kFp8 && !kNarrow && !kShort && !kShape.one_tile && !kWholeRows &&
                                        (kHeadDimQk | kHeadDimV) % 64 == 0 && kHeadDimV > 64;
  // Plain calls in boxes have a kernel of their own, so the other one may have code that they do not run.
  static constexpr bool kHasPlain =
      !kNarrow && !kShort && !kWholeRows && kHeadDimV <= 128 && kHeadDimQk <= 128 && !kShape.one_tile;
  static constexpr bool kHasPlainNarrow = kHasPlain && !kFp8 && kHeadDimQk == 128 && kHeadDimV == 128;
  // And plain calls whose rows are gathered.
  static constexpr bool kHasPlainRows = !kFp8 && !kNarrow && !kShort;
  static constexpr int kConsumerRegisters = kShape.registers;
  // Warpgroups start with equal shares and may trade what they were given together.
  static constexpr int kProducerRegisters =
      65536 / kShape.ctas / kThreads / 8 * 8 * (kWarpgroups + 1) - kWarpgroups * kConsumerRegisters;
  static_assert(!kTradesRegisters || kProducerRegisters >= 24);

  // A chunk: 128 bytes of each row of a tile, under the 128-byte swizzle.
  static constexpr int kChunk = 128 / sizeof(T);  // elements
  static constexpr int kQkChunks = ceil_div(kHeadDimQk, kChunk), kVChunks = ceil_div(kHeadDimV, kChunk);
  // In a tile of keys or values so many rows of a chunk follow each other, then the next chunk comes. Groups of eight
  // rows lie so far apart.
  static constexpr int kChunkRows = kWholeRows ? 8 : kKeys;
  static constexpr int kKGroupBytes = kWholeRows ? kQkChunks * 1024 : 1024;
  static constexpr int kVGroupBytes = kWholeRows ? kVChunks * 1024 : 1024;
  static constexpr int kQBytes = kQkChunks * kRows * 128;
  static constexpr int kKBytes = kQkChunks * kKeys * 128;
  static constexpr int kVBytes = kFp8 ? ceil_div(kKeys, 128) * kHeadDimV * 128 : kVChunks * kKeys * 128;
  // Tiles as they come: e4m3 values to be transposed, or e4m3 keys and values to be made wide.
  static constexpr int kRawBytes = kFp8 ? kVChunks * kKeys * 128 : kNarrow ? narrow_tile_bytes(kShape) : 0;
  static constexpr int kRawStages =
      kNarrow ? min_of(4, (most_tile_bytes(kShape.ctas) - wide_tile_bytes(kShape)) / narrow_tile_bytes(kShape))
              : kStages;
};

// Offsets in bytes from a base on 1 KB.
template <class Tr>
struct SharedLayout {
  static constexpr int kQ = 0;
  static constexpr int kK = kQ + Tr::kQStages * Tr::kQBytes;
  static constexpr int kV = kK + Tr::kStages * Tr::kKBytes;
  static constexpr int kRaw = kV + Tr::kStages * Tr::kVBytes;
  static constexpr int kWorks = kRaw + Tr::kRawStages * Tr::kRawBytes;  // Work [kWorkStages]
  static constexpr int kWorkBytes = 72;
  static constexpr int kBarriers = kWorks + Tr::kWorkStages * kWorkBytes;
  // q full, q empty; work known, work done; k full, k empty, v full, v empty; raw full, raw empty.
  static constexpr int kNumBarriers = 2 * Tr::kQStages + 2 * Tr::kWorkStages + 4 * Tr::kStages + 2 * Tr::kRawStages;
  // What CTA 0 of a pair tells CTA 1: the next works. Full, empty, an int.
  static constexpr int kMailFull = kBarriers + 8 * kNumBarriers, kMailEmpty = kMailFull + 8, kMail = kMailEmpty + 8;
  static constexpr int kLastKeys = kMail + 8;  // of a long work are asked for: the next one may be taken
  static constexpr int kBytes = kLastKeys + 8;
  static constexpr int kAllBytes = kBytes + 1008;  // the base, on 16 bytes, is rounded up
  static_assert(Tr::kShape.ctas * (kAllBytes + 1024) <= 228 * 1024, "an SM has 228 KiB, and keeps one for each CTA");

  static constexpr int kQFull = kBarriers, kQEmpty = kQFull + 8 * Tr::kQStages;
  static constexpr int kWorkKnown = kQEmpty + 8 * Tr::kQStages, kWorkDone = kWorkKnown + 8 * Tr::kWorkStages;
  static constexpr int kKFull = kWorkDone + 8 * Tr::kWorkStages, kKEmpty = kKFull + 8 * Tr::kStages;
  static constexpr int kVFull = kKEmpty + 8 * Tr::kStages, kVEmpty = kVFull + 8 * Tr::kStages;
  // Of tiles as they come, which await their transpose, or to be made wide, or zeros in place of keys that nobody sees.
  static constexpr int kRawFull = kVEmpty + 8 * Tr::kStages, kRawEmpty = kRawFull + 8 * Tr::kRawStages;
};

}  // namespace attnops::fmha::sm90
