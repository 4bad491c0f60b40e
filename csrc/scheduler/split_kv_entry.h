#pragma once
#include <cstdint>

namespace attnops {

// One SM part's share of a decode batch: a row of `tile_scheduler_metadata`, int32 [num_sm_parts, 8].
//
// A *work* is what one CTA computes for one request: works are numbered request-major,
// work = request * works_per_request + i (i is a KV head, or a block of query rows). Work w has num_tiles(w) >= 1 KV
// tiles, numbered from the first tile that any of its queries may see. The part owns the tiles from
// (begin_work, begin_tile) up to, not including, (end_work, end_tile), in lexicographic order; end_tile == 0 means
// that end_work belongs wholly to later parts. begin == end: the part is idle.
// Where parts come in groups (split_kv.h), a part's row is its group's share, and first_part counts groups.
struct SplitKvEntry {
  int32_t begin_work, begin_tile;
  int32_t end_work, end_tile;
  int32_t begin_split;       // index, among the splits of begin_work, of this part's first piece of it
  int32_t begin_num_splits;  // splits of begin_work, all parts together; 1: write the output directly
  int32_t last_num_splits;   // splits of the last work touched (begin_work itself when only one is touched)
  int32_t first_part;        // lowest part that holds a piece of begin_work; balanced mode only
};
static_assert(sizeof(SplitKvEntry) == 8 * sizeof(int32_t));

inline constexpr int kSplitKvEntrySize = 8;

}  // namespace attnops
