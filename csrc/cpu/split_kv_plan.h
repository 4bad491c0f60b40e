#pragma once
#include <algorithm>
#include <cstring>
#include <numeric>
#include <vector>

#include "scheduler/split_kv.h"
#include "scheduler/split_kv_fill.h"

namespace attnops::cpu {

// The split-KV plan of a batch on the CPU: what the planning kernel of a GPU writes, bit for bit. A decode op plans
// with it, and compares with it the plan that it was given.
class SplitKvPlanner {
 public:
  // `fills`: whether shares are filled where that may be (scheduler/split_kv_fill.h).
  SplitKvPlanner(const SplitKvGeometry& geometry, const int32_t* cache_seqlens, bool fills = false)
      : geometry_(geometry), prefix_(geometry.num_requests + 1, 0), tiles_(geometry.num_requests) {
    int longest = 0;
    for (int b = 0; b < geometry.num_requests; ++b) {
      tiles_[b] = num_tiles(geometry, cache_seqlens[b]);
      if (geometry.even_shares > 0 && tiles_[b] != tiles_[0]) geometry_.uneven = true;
      longest = std::max(longest, tiles_[b]);
    }
    for (int b = 0; b < geometry.num_requests; ++b) {
      prefix_[b + 1] = prefix_[b] + geometry.works_per_request * work_cost(geometry_, tiles_[b]);
    }
    const int64_t budget = part_budget(geometry_, prefix_.back());
    geometry_.whole = longest <= most_whole_tiles(geometry_, budget);
    geometry_.cuts = cuts_of_works(geometry_, budget, tiles_.empty() ? 0 : tiles_[0]);
    find_pieces();
    if (fills && may_fill_shares(geometry_)) find_filled(cache_seqlens);
    is_dealt_ = deals_works(geometry_, budget, longest);
    even_ = std::count(tiles_.begin(), tiles_.end(), longest) == geometry.num_requests;
  }

  SplitKvEntry entry(int part) const {
    if (!points_.empty()) return filled_entry(points_.data(), num_groups(geometry_), part / geometry_.parts_per_group);
    return split_kv_entry(geometry_, {prefix_.data(), tiles_.data()}, part / geometry_.parts_per_group);
  }

  // Rows `tile_scheduler_metadata` [num_sm_parts, 8] and `num_splits` [B + 1].
  void write(int32_t* tile_scheduler_metadata, int32_t* num_splits) const {
    for (int part = 0; part < geometry_.num_sm_parts; ++part) {
      const SplitKvEntry row = entry(part);
      std::memcpy(tile_scheduler_metadata + part * kSplitKvEntrySize, &row, sizeof(row));
    }
    int64_t cuts = 0;
    for (int b = 0; b < geometry_.num_requests; ++b) {
      num_splits[b] = splits_before(cuts);
      cuts += num_fixed_splits(geometry_, tiles_[b]);
    }
    num_splits[geometry_.num_requests] = splits_before(cuts);
    if (!is_dealt_) return;
    std::iota(num_splits, num_splits + geometry_.num_requests, 0);
    std::stable_sort(num_splits, num_splits + geometry_.num_requests,
                     [&](int a, int b) { return dealt_class(tiles_[a]) > dealt_class(tiles_[b]); });
    const auto longer = std::count_if(tiles_.begin(), tiles_.end(), [](int n) { return n > kShortWorkTiles; });
    num_splits[geometry_.num_requests] = dealt_word(static_cast<int>(longer), even_);
  }

  // What `write` writes, in memory of its own: nobody changes it while a call reads it.
  struct Plan {
    std::vector<int32_t> tile_scheduler_metadata, num_splits;

    bool matches(const int32_t* other_metadata, const int32_t* other_splits) const {
      return std::equal(tile_scheduler_metadata.begin(), tile_scheduler_metadata.end(), other_metadata) &&
             std::equal(num_splits.begin(), num_splits.end(), other_splits);
    }
  };

  Plan plan() const {
    Plan plan{std::vector<int32_t>(static_cast<size_t>(geometry_.num_sm_parts) * kSplitKvEntrySize),
              std::vector<int32_t>(geometry_.num_requests + 1)};
    write(plan.tile_scheduler_metadata.data(), plan.num_splits.data());
    return plan;
  }

 private:
  void find_pieces() {
    const int works = geometry_.works_per_request;
    const auto pieces_of = [works](int tiles, int most) { return works * ceil_div(tiles, most); };
    const int64_t total = works * std::accumulate(tiles_.begin(), tiles_.end(), int64_t{0});
    geometry_.piece = longest_piece(geometry_, total, [&](int most) {
      int count = 0;
      for (const int tiles : tiles_) count += pieces_of(tiles, most);
      return count;
    });
    if (geometry_.piece == 0) return;
    for (size_t b = 0; b < tiles_.size(); ++b) prefix_[b + 1] = prefix_[b] + pieces_of(tiles_[b], geometry_.piece);
  }

  void find_filled(const int32_t* cache_seqlens) {
    const int requests = geometry_.num_requests, shares = num_groups(geometry_);
    std::vector<int64_t> prefix(requests + 1, 0);
    std::vector<int32_t> tiles(requests);
    for (int b = 0; b < requests; ++b) {
      tiles[b] = filled_tiles(geometry_, cache_seqlens[b]);
      prefix[b + 1] = prefix[b] + geometry_.works_per_request * work_cost(geometry_, tiles[b]);
    }
    const bool uneven = std::count(tiles.begin(), tiles.end(), tiles[0]) != requests;
    if (!fills_shares(geometry_, uneven, prefix.back())) return;
    const SplitKvBatch batch{prefix.data(), tiles.data()};
    const int total = static_cast<int>(prefix.back());
    std::vector<int> places[2];
    int first[2];
    for (const bool cuts : {true, false}) {
      std::vector<int>& found = places[cuts];
      int& number = first[cuts];
      for (number = 0; number < kFilledBudgets; ++number) {
        const SplitKvFilling filling{filled_budget(geometry_, total, number), cuts};
        found.clear();
        int count = 0;
        for (int half = 0; half < 2; ++half) {
          count += fill_shares(geometry_, batch, filling, filled_half(geometry_, batch, total, cuts, half), shares,
                               [&](int, int place) { found.push_back(place); });
        }
        if (count <= shares) break;
      }
    }
    const bool cuts = filled_with_cuts(first[true], first[false]);
    if (first[cuts] == kFilledBudgets) return;
    for (const int place : places[cuts]) points_.push_back(filled_point(geometry_, batch, place));
    points_.resize(shares + 1, {num_works(geometry_), 0});
  }

  SplitKvGeometry geometry_;
  std::vector<int64_t> prefix_;
  std::vector<int32_t> tiles_;
  std::vector<SplitKvPoint> points_;  // where shares begin that are filled, and where the last ends
  bool is_dealt_, even_;
};

}  // namespace attnops::cpu
