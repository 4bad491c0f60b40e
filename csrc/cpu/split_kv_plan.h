#pragma once
#include <cstring>
#include <vector>

#include "scheduler/split_kv.h"

namespace attnops::cpu {

// The split-KV plan of a batch on the CPU: what the planning kernel of a GPU writes, bit for bit. A decode op plans
// with it, and compares with it the plan that it was given.
class SplitKvPlanner {
 public:
  SplitKvPlanner(const SplitKvGeometry& geometry, const int32_t* cache_seqlens)
      : geometry_(geometry), prefix_(geometry.num_requests + 1, 0), tiles_(geometry.num_requests) {
    for (int b = 0; b < geometry.num_requests; ++b) {
      tiles_[b] = num_tiles(geometry, cache_seqlens[b]);
      if (geometry.even_shares > 0 && tiles_[b] != tiles_[0]) geometry_.uneven = true;
    }
    for (int b = 0; b < geometry.num_requests; ++b) {
      prefix_[b + 1] = prefix_[b] + geometry.works_per_request * work_cost(geometry_, tiles_[b]);
    }
  }

  SplitKvEntry entry(int part) const {
    return split_kv_entry(geometry_, {prefix_.data(), tiles_.data()}, part / geometry_.parts_per_group);
  }

  // Rows `tile_scheduler_metadata` [num_sm_parts, 8] and `num_splits` [B + 1].
  void write(int32_t* tile_scheduler_metadata, int32_t* num_splits) const {
    for (int part = 0; part < geometry_.num_sm_parts; ++part) {
      const SplitKvEntry row = entry(part);
      std::memcpy(tile_scheduler_metadata + part * kSplitKvEntrySize, &row, sizeof(row));
    }
    num_splits[0] = 0;
    for (int b = 0; b < geometry_.num_requests; ++b) {
      num_splits[b + 1] = num_splits[b] + num_fixed_splits(geometry_, tiles_[b]);
    }
  }

  // Whether `write` would write these.
  bool matches(const int32_t* tile_scheduler_metadata, const int32_t* num_splits) const {
    std::vector<int32_t> rows(static_cast<size_t>(geometry_.num_sm_parts) * kSplitKvEntrySize);
    std::vector<int32_t> splits(geometry_.num_requests + 1);
    write(rows.data(), splits.data());
    return std::memcmp(rows.data(), tile_scheduler_metadata, rows.size() * sizeof(int32_t)) == 0 &&
           std::memcmp(splits.data(), num_splits, splits.size() * sizeof(int32_t)) == 0;
  }

 private:
  SplitKvGeometry geometry_;
  std::vector<int64_t> prefix_;
  std::vector<int32_t> tiles_;
};

}  // namespace attnops::cpu
