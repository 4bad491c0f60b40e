#pragma once
#include <climits>
#include <cstdint>

#include "core/math.h"
#include "core/types.h"
#include "scheduler/split_kv_entry.h"

namespace attnops {

// What a plan's rows number: works, and groups of parts. `balanced`: no batch-invariant cuts.
struct SplitKvExtent {
  int works, groups;
  bool balanced;
};

inline constexpr int kMostTiles = 1 << 22;  // more than a work can have (kMostCacheTokens)

// A row as a kernel on a GPU follows it, whoever wrote it: works that there are, splits whose partial results have a
// place, and nothing to do where that makes no sense. `group` is the part's own. A planner's row stays as it is, but
// for numbers that nobody reads. How many tiles a work has is known where its length is: see the walks.
ATTNOPS_HOST_DEVICE inline SplitKvEntry bounded(SplitKvEntry entry, const SplitKvExtent& plan, int group) {
  entry.begin_work = min_of(max_of(entry.begin_work, 0), plan.works);
  entry.end_work = min_of(max_of(entry.end_work, entry.begin_work), plan.works);
  entry.begin_tile = min_of(max_of(entry.begin_tile, 0), kMostTiles);
  const int least_end = entry.begin_work == entry.end_work ? entry.begin_tile : 0;
  entry.end_tile = min_of(entry.end_work == plan.works ? 0 : entry.end_tile, kMostTiles);
  entry.end_tile = max_of(entry.end_tile, least_end);
  entry.first_part = min_of(max_of(entry.first_part, 0), group);
  if (plan.balanced) entry.begin_split = group - entry.first_part;  // they are the parts from the first on
  entry.begin_num_splits =
      min_of(max_of(entry.begin_num_splits, group - entry.first_part + 1), plan.groups - entry.first_part);
  entry.last_num_splits = min_of(max_of(entry.last_num_splits, 1), plan.groups - group);
  return entry;
}

// The same for kernels that would rather have no row than another one: below 0 where a part must not follow its row as
// it stands. `any_splits` is the number of groups where splits are parts, in balanced plans; where they are cuts, which
// the walk finds by itself, INT_MAX. What is left to the walk: rows without a piece, tiles that a work has not, and
// begin_split. Every bound is a sign, so that all of them are one number.
ATTNOPS_HOST_DEVICE inline int broken_bounds(const SplitKvEntry& entry, int works, int any_splits, int group) {
  const auto bits = [](int word) { return static_cast<uint32_t>(word); };
  const uint32_t begin_work = bits(entry.begin_work), first_part = bits(entry.first_part);
  const uint32_t last_work = bits(entry.end_work) - (entry.end_tile > 0 ? 0 : 1), later_works = last_work - begin_work;
  // What is subtracted is at least 0, or the sign is there already.
  uint32_t broken = begin_work | bits(entry.end_work) | later_works | (bits(works) - 1 - last_work);
  broken |= bits(entry.begin_tile) | (bits(kMostTiles) - bits(entry.begin_tile));
  broken |= bits(kMostTiles) - bits(entry.end_tile);
  broken |= first_part | (bits(group) - first_part);
  // A number of splits below 0 is one piece, or wraps to a bound that is broken.
  broken |= bits(any_splits) - first_part - bits(entry.begin_num_splits);
  const uint32_t last_splits = bits(any_splits) - bits(group) - bits(entry.last_num_splits);
  broken |= static_cast<int>(later_works) > 0 ? last_splits : 0;  // else they are begin_num_splits
  return static_cast<int>(broken);
}

}  // namespace attnops
