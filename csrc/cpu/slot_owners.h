#pragma once
#include <algorithm>
#include <cstdint>
#include <vector>

#include "core/state_report.h"

// Which rows of a call name the same slot of a pool, in n log n steps. The kernels' checked mode compares pairs.
namespace attnops::cpu {

class SlotOwners {
 public:
  // Adds what a row names; below 0: nothing. Rows come in their order.
  void add(int64_t slot, int64_t row) {
    if (slot >= 0) named_.push_back({slot, static_cast<int64_t>(named_.size()), row});
  }

  // Between the last `add` and the first question.
  void sort() {
    const auto before = [](const Named& a, const Named& b) {
      return a.slot != b.slot ? a.slot < b.slot : a.order < b.order;
    };
    std::sort(named_.begin(), named_.end(), before);
    named_.erase(
        std::unique(named_.begin(), named_.end(), [](const Named& a, const Named& b) { return a.slot == b.slot; }),
        named_.end());
  }

  // The first row that names a slot; -1: none does.
  int64_t first(int64_t slot) const {
    const Named* found = find(slot);
    return found == nullptr ? -1 : found->row;
  }

  // To be asked for what was added, in its order: records that an earlier one names the same slot.
  void check_next(ReportOp op, int64_t slot, int64_t row, int32_t* report) {
    if (slot < 0) return;
    const Named* found = find(slot);
    if (found->order != next_++) record_fault(report, {op, kReportSharedSlot, row, found->row, slot, 0});
  }

 private:
  struct Named {
    int64_t slot, order, row;
  };

  const Named* find(int64_t slot) const {
    const auto at = std::lower_bound(named_.begin(), named_.end(), slot,
                                     [](const Named& a, int64_t wanted) { return a.slot < wanted; });
    return at == named_.end() || at->slot != slot ? nullptr : &*at;
  }

  std::vector<Named> named_;
  int64_t next_ = 0;
};

// The owners of what rows [0, count) name below `num_slots`, one slot each.
inline SlotOwners owners_of(const int32_t* slots, int64_t count, int64_t num_slots = INT64_MAX) {
  SlotOwners owners;
  for (int64_t row = 0; row < count; ++row) {
    if (slots[row] < num_slots) owners.add(slots[row], row);
  }
  owners.sort();
  return owners;
}

}  // namespace attnops::cpu
