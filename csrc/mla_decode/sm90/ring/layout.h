#pragma once
#include "mla_decode/sm90/layout.h"

namespace attnops::mla_decode::sm90::ring {

// Of the 168 that each thread has at launch. 154 are the fewest with which the compiler takes a 64 x 256 accumulator;
// the scoring group holds 124 registers of queries and 32 of scores.
inline constexpr int kValuesRegisters = 160;
inline constexpr int kScoresRegisters = 184;

// The ring that everything comes through: slots of nine 64 x 64 tiles, a KV tile's or a piece's queries. The last tile
// of a KV slot, its rope part, holds the tile's probabilities once its scores are done.
inline constexpr int kSlots = 3;
inline constexpr int kRopeQueries = kSlots * kOperandBytes;      // of the piece: its rope part,
inline constexpr int kFirstQueries = kRopeQueries + kTileBytes;  // and its first 16 columns; the rest is in registers
inline constexpr int kTotals = kFirstQueries + 64 * 32;          // float [2][64]: sums, maxima
inline constexpr int kShifts = kTotals + 2 * 64 * 4;             // uint8 [kSlots][64]: what a tile rescales rows by
inline constexpr int kFinished = kShifts + kSlots * 64;          // StoredPiece; an Item that nobody reads
inline constexpr int kFlags = kFinished + 16;                    // uint8 [kSlots][4]: TileFlags, by warp
inline constexpr int kItems = kFlags + 16;                       // Item [2]
inline constexpr int kEntry = kItems + 2 * 16;                   // the part's row of the plan
inline constexpr int kWorksAhead = 4;                            // that the plan is ahead of the scores, at most
inline constexpr int kWorks = kEntry + 32;                       // Work [kWorksAhead]
inline constexpr int kPlanner = kWorks + kWorksAhead * 24;       // PlannerState
inline constexpr int kLengthAhead = kPlanner + 32;               // int: of the request of the next work
inline constexpr int kPageAhead = kLengthAhead + 4;              // int: of the next tile
inline constexpr int kBarriers = kPageAhead + 4;                 // 8 bytes each, see below
inline constexpr int kBarriersPerSlot = 3;                       // full; given back, by half
inline constexpr int kBarrierCount = kSlots * kBarriersPerSlot + 2;
inline constexpr int kScoresRead = kBarriers + 8 * (kBarrierCount - 2);  // by the warps of the scoring group
inline constexpr int kTotalsRead = kBarriers + 8 * (kBarrierCount - 1);  // of a piece, by the values groups
inline constexpr int kSharedBytes = kBarriers + 8 * kBarrierCount;
static_assert(kSharedBytes <= 227 * 1024);

inline constexpr int full_slot(int slot) { return kBarriers + 8 * slot; }
inline constexpr int empty_half(int slot, int half) { return kBarriers + 8 * (kSlots + 2 * slot + half); }

inline constexpr int next_slot(int slot) { return slot == kSlots - 1 ? 0 : slot + 1; }
inline constexpr int before_slot(int slot) { return slot == 0 ? kSlots - 1 : slot - 1; }

// Where the rows of a finished piece go, and what the values groups must know of a tile. The scoring group leaves this
// in shared memory: the values groups have no registers for pieces.
struct StoredPiece {
  int request, first_row, num_rows, partial;
};
enum TileFlags : int { kLastOfPiece = 1, kLastOfAll = 2, kRescales = 4, kSameQueries = 8 };

// What comes into the ring: a piece's queries or a tile. All by boxes of the copy engine.
struct alignas(16) Item {
  enum Kind : int { kNothing, kQueries, kKeys };
  Kind kind;
  int row;    // first query row of the request, or first token in the page
  int plane;  // request, or page
};
static_assert(sizeof(Item) == 16);

// The part's tiles of a work, as the planner leaves them for the scores by the work's first tile: they have no
// registers for that, and what they would read from memory would come behind the boxes.
struct alignas(8) Work {
  int request, first_row, length, first_tile;
  int tiles;    // less than zero: so many, and it is the part's last work
  int partial;  // of its first cut; -1: none, kNoRoom: no rows either
};
static_assert(sizeof(Work) == 24);
inline constexpr int kNoRoom = -2;

// What the planner keeps between items.
struct alignas(16) PlannerState {
  const int32_t* cell;  // of the page table, for the next tile
  int cells_left;       // from there on
  int tiles_left;       // of the work
  int token;            // of the next tile in its page
  int page;             // of the next tile; kAsked: on its way
  int work, count;      // the next one, and which of the part's it is
};
static_assert(sizeof(PlannerState) == 32);
inline constexpr int kAsked = INT32_MIN;

// What the host knows of a call, so that nobody on a GPU divides.
struct Shape {
  float requests_per_group;  // if works are even
  int cells;                 // of a request in the page table
  int most_tokens;           // that they have room for
  Divisor by_page_size;
};

// Hardware barriers. The values groups pass one more for every tile than the scoring group does, which therefore waits
// for them at barriers in memory only: docs/sanitizer.md.
enum NamedBarrier : int {
  kGo = 1,                        // by slot: a tile's probabilities are there, and its values may be multiplied
  kTotalsWritten = kGo + kSlots,  // of a piece
  kItemReady,                     // of the values groups
  kQueriesKept,                   // of the scoring group: where all of it finds them
};

}  // namespace attnops::mla_decode::sm90::ring
