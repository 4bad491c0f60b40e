#pragma once
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

// The same in fewer steps, for kernels that ask first whether a part has work. What is below zero counts as very large.
ATTNOPS_HOST_DEVICE inline int at_most(int word, int most) {
  return static_cast<int>(min_of(static_cast<uint32_t>(word), static_cast<uint32_t>(most)));
}

// Whether a row, as somebody wrote it, begins in a work that there is, and before its end.
ATTNOPS_HOST_DEVICE inline bool has_work(const SplitKvEntry& entry, int works, int groups) {
  const auto place = [](int work, int tile) {
    return static_cast<uint64_t>(static_cast<uint32_t>(work)) << 32 | static_cast<uint32_t>(tile);
  };
  const bool begins = static_cast<uint32_t>(entry.begin_work) < static_cast<uint32_t>(works);
  const bool has_part = static_cast<uint32_t>(entry.first_part) < static_cast<uint32_t>(groups);
  return begins & has_part & (place(entry.begin_work, entry.begin_tile) < place(entry.end_work, entry.end_tile));
}

// Of a row that has work.
ATTNOPS_HOST_DEVICE inline SplitKvEntry clamped(SplitKvEntry entry, const SplitKvExtent& plan, int group) {
  entry.begin_tile = at_most(entry.begin_tile, kMostTiles);
  entry.end_work = at_most(entry.end_work, plan.works);
  entry.end_tile = entry.end_work == plan.works ? 0 : at_most(entry.end_tile, kMostTiles);
  entry.first_part = at_most(entry.first_part, group);
  if (plan.balanced) entry.begin_split = group - entry.first_part;
  entry.begin_num_splits = min_of(entry.begin_num_splits, plan.groups - entry.first_part);
  entry.last_num_splits = min_of(entry.last_num_splits, plan.groups - group);
  return entry;
}

}  // namespace attnops
