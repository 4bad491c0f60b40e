#pragma once
#include <bit>
#include <cmath>
#include <cstdint>

#include "mla_decode/params.h"
#include "mla_decode/plan.h"

namespace attnops::cpu {
struct TileOps;
}

// What a thread does for its part of the plan, without any arithmetic: which rows meet which keys, where the keys lie,
// and where the result goes. Shared by the plain reference and every instruction set, and compiled once, for all
// processors (pieces.cpp).
namespace attnops::mla_decode::cpu {

// A run of KV tiles of one work. Tile t holds the keys [t * kPlanTileTokens, (t + 1) * kPlanTileTokens) of the request.
struct Piece {
  int request;
  int first_row, num_rows;  // query rows (token, head) of the request, token-major; at most kPlanRows
  int first_tile, num_tiles;
  int64_t partial;  // the row of out_partial that takes the result, or -1: the only piece of its work
};

// A way to compute a piece; `ops` is what it computes with, null for the reference.
struct Kernel {
  void (*run)(const Params& p, const Piece& piece, const attnops::cpu::TileOps* ops);
  const attnops::cpu::TileOps* ops;
};

// What planners count: tokens of the cache, or keys of the lists.
int keys_of_request(const Params& p, int request);

// Runs everything that part `part` of the plan owns.
void run_part(const Params& p, int part, const Kernel& kernel);

inline int head_dim_qk(const Params& p) { return p.shared_rows ? kHeadDimShared : kHeadDimQk; }

// A key's bytes in the pool. Its scales are apart in rows of kSharedRowBytes.
struct Key {
  const uint8_t* row;
  const uint8_t* scales;
  bool rounded = false;  // rounded_keys.h
};

// The float32 of a ue8m0 scale.
inline float power_of_two(uint8_t exponent) {
  if (exponent == 0xFF) return NAN;
  return exponent == 0 ? 0x1p-127f : std::bit_cast<float>(static_cast<uint32_t>(exponent) << 23);
}

// Runs a work as one piece, without a plan: a block of a request's rows and all its keys.
void run_whole(const Params& p, int request, int block, const Kernel& kernel);

// The keys of one tile, as the rows of a piece see them.
struct KeyTile {
  // `row` is null when no row of the piece sees the key, and then it must not be read.
  Key key[kPlanTileTokens];
  // Per row of the piece: bit k says that it sees key k.
  uint64_t visible[kPlanRows];
  bool any_visible;
  bool all_visible;  // every row sees every key: no mask needed
};

KeyTile key_tile(const Params& p, const Piece& piece, int tile);

// Where row i of a piece lies.
struct RowPlace {
  const uint8_t* q;     // 512 or 576 values
  const uint8_t* q_pe;  // the last 64
  uint8_t* out;
  int64_t lse;  // index into lse
  int head;
};

RowPlace row_place(const Params& p, const Piece& piece, int i);

// What the row's output must be multiplied by for its sink; `lse` is the natural log and stays what it is.
float sink_factor(const Params& p, int head, float lse);

// Writes row i of a piece, already divided by its sum: to the output, sink applied, or to the piece's partial result.
void store_row(const Params& p, const Piece& piece, int i, const float* values, float lse);

// Merges the partial results of plan row `row` (0 .. kPlanRows - 1) of the works that part `part` has the first piece
// of (balanced mode), in the order of the splits, and writes the output.
void merge_balanced(const Params& p, int part, int row);

// The same for the works of request `request` in batch-invariant mode. `row` counts the request's query rows.
void merge_fixed(const Params& p, int request, int row);

}  // namespace attnops::mla_decode::cpu
