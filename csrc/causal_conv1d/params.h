#pragma once
#include <cstdint>

#include "core/linear_verify.h"
#include "core/state_report.h"

namespace attnops::causal_conv1d {

inline constexpr int kMaxWidth = 4;

// A depthwise convolution over time: out[t, c] = act(bias[c] + sum_j weight[c, j] x[t - width + 1 + j, c]), where the
// inputs before a request's first token are its state. Strides in elements.
struct Params {
  const void* x;  // [num_tokens, channels], channels dense
  void* out;      // the same shape
  int64_t num_tokens, channels, stride_x, stride_out;
  void* states;  // [num_slots, channels, width - 1]: the last inputs, the newest at the end
  int64_t num_slots, stride_slot, stride_channel, stride_time;
  const void* weight;  // [channels, width], dense
  const void* bias;    // [channels], or null
  int width;
  bool silu;
  DType dtype;                // of all of them
  const int32_t* cu_seqlens;  // [batch_size + 1]; null: tokens_per_request tokens of each
  int64_t batch_size, tokens_per_request;
  const int32_t* state_indices;      // [batch_size]; below 0: padding, nothing is touched and out is 0
  const uint8_t* has_initial_state;  // [batch_size], or null: all have one; without one the inputs before are 0
  ReportOp op;
  int32_t* report;

  // First token of a request; bounds that decrease or leave the tokens hold none.
  ATTNOPS_HOST_DEVICE int64_t first_token(int64_t request) const {
    const int64_t first = cu_seqlens == nullptr ? request * tokens_per_request : cu_seqlens[request];
    return first < 0 ? 0 : first > num_tokens ? num_tokens : first;
  }
  ATTNOPS_HOST_DEVICE bool in_pool(int64_t request) const {
    return state_indices[request] >= 0 && state_indices[request] < num_slots;
  }

  // Records what a request names out of range, and a slot that an earlier one names.
  ATTNOPS_HOST_DEVICE void check(int64_t request, int32_t* to) const {
    check_with(request, to, [&](int64_t slot) {
      for (int64_t other = 0; other < request; ++other) {
        if (state_indices[other] == slot) record_fault(to, {op, kReportSharedSlot, request, other, slot, 0});
      }
    });
  }

  // The same, where `find_shared` records the earlier request that names a slot.
  template <typename FindShared>
  ATTNOPS_HOST_DEVICE void check_with(int64_t request, int32_t* to, const FindShared& find_shared) const {
    const int64_t slot = state_indices[request];
    if (slot >= num_slots) record_fault(to, {op, kReportStateSlot, request, 0, slot, num_slots});
    if (slot >= 0) find_shared(slot);
    if (cu_seqlens == nullptr) return;
    const int64_t begin = cu_seqlens[request], end = cu_seqlens[request + 1];
    if (end < begin || begin < 0 || end > num_tokens) {
      record_fault(to, {op, kReportTokenBounds, request, begin, end, num_tokens});
    }
  }
};

// Drafts of each request, the tokens of `conv`, from states that are only read. A draft's inputs are its own, those of
// its nearest ancestors, and behind the root those of the state.
struct DraftParams {
  Params conv;
  int drafts;     // of a request, 1 to kMaxDrafts
  void* windows;  // [batch_size, drafts, channels, width - 1]: the state that each draft would leave
  int64_t stride_request, stride_draft, stride_channel, stride_time;
  const uint8_t* tree_mask;  // [batch_size, drafts, ceil(drafts / 8)], packed; null: a chain

  // Where the inputs before that of draft t come from, the oldest first: from draft `places[j]`, or below 0 from the
  // state, whose newest input is -1.
  template <int kMost>
  ATTNOPS_HOST_DEVICE void places_of(int64_t request, int t, int history, int (&places)[kMost]) const {
    const uint32_t ancestors = draft_ancestors(tree_mask, drafts, request, t);
    int draft = t, behind = 0;  // the last place among the drafts, and how many are in the state
    for (int j = kMost - 1; j >= 0; --j) {
      if (j >= history) continue;
      do --draft;
      while (draft >= 0 && (ancestors >> draft & 1) == 0);
      places[j] = draft >= 0 ? draft : -++behind;
    }
  }
};

}  // namespace attnops::causal_conv1d
