#pragma once
#include <cstdint>

#include "core/state_report.h"

namespace attnops::linear_state {

// Slots of a pool of states, all layers at once: [num_layers, num_slots, bytes of a slot without gaps]. Strides in
// bytes.
struct Params {
  void* states;
  int64_t num_layers, num_slots, slot_bytes, stride_layer, stride_slot;
  const void* source;  // the pool that `src` names slots of: another one, or `states`
  int64_t source_slots, source_stride_layer, source_stride_slot;
  bool within;         // it is `states`
  const int32_t* src;  // [count]; null: the slots are cleared
  const int32_t* dst;  // [count]; a pair with a slot below 0 does nothing
  int64_t count;
  ReportOp op;
  int32_t* report;

  ATTNOPS_HOST_DEVICE bool in_pool(int64_t slot) const { return slot >= 0 && slot < num_slots; }
  ATTNOPS_HOST_DEVICE char* at(int64_t layer, int64_t slot) const {
    return static_cast<char*>(states) + layer * stride_layer + slot * stride_slot;
  }
  ATTNOPS_HOST_DEVICE const char* source_at(int64_t layer, int64_t slot) const {
    return static_cast<const char*>(source) + layer * source_stride_layer + slot * source_stride_slot;
  }

  // Whether pair i moves anything.
  ATTNOPS_HOST_DEVICE bool moves(int64_t i) const {
    if (!in_pool(dst[i]) || src == nullptr) return in_pool(dst[i]);
    return src[i] >= 0 && src[i] < source_slots && !(within && src[i] == dst[i]);
  }

  // Records what is wrong with pair i: a slot outside the pool, or one that another pair writes or reads.
  ATTNOPS_HOST_DEVICE void check(int64_t i, int32_t* to) const {
    check_with(i, to, [&] {
      for (int64_t other = 0; other < count; ++other) {
        if (other == i || !moves(other)) continue;
        const bool writes = other < i && dst[other] == dst[i];
        const bool reads = src != nullptr && within && src[other] == dst[i];
        if (writes || reads) record_fault(to, {op, kReportSharedSlot, i, other, dst[i], 0});
      }
    });
  }

  // The same, where `find_shared` records the other pairs of one that moves.
  template <typename FindShared>
  ATTNOPS_HOST_DEVICE void check_with(int64_t i, int32_t* to, const FindShared& find_shared) const {
    const auto outside = [&](int64_t slot, int64_t slots) {
      if (slot >= slots) record_fault(to, {op, kReportStateSlot, i, 0, slot, slots});
    };
    outside(dst[i], num_slots);
    if (src != nullptr) outside(src[i], source_slots);
    if (moves(i)) find_shared();
  }
};

}  // namespace attnops::linear_state
