#pragma once
#include "core/linear_step.h"
#include "core/state_report.h"

namespace attnops {

inline constexpr int kMaxDrafts = 16;

// The drafts before draft t of a request that it descends from, a bit each. `tree_mask` is [batch_size, drafts,
// ceil(drafts / 8)], packed; null: a chain.
ATTNOPS_HOST_DEVICE inline uint32_t draft_ancestors(const uint8_t* tree_mask, int drafts, int64_t request, int t) {
  const uint32_t before = (1u << t) - 1;
  if (tree_mask == nullptr) return before;
  const int bytes = (drafts + 7) / 8;
  const uint8_t* row = tree_mask + (request * drafts + t) * bytes;
  return (row[0] | (bytes > 1 ? uint32_t{row[1]} << 8 : 0u)) & before;
}

// Rings of updates beside a pool of states. A slot's state is its state in the pool after the first `ring_len` rows of
// its ring, S = decay S + u k^T each; the rows behind them are the drafts of the last verification. All dense.
struct StateRings {
  float* u;          // [num_slots, num_heads, rows, value_dim]
  float* k;          // [num_slots, num_groups, rows, key_dim]
  float* decay;      // [num_slots, num_heads, rows], or [num_slots, num_heads, rows, key_dim] with gates per channel
  int32_t* lengths;  // [num_slots]
  int rows;          // of a ring
  int num_groups;    // of heads that share keys
  bool per_channel;

  ATTNOPS_HOST_DEVICE float* u_row(const LinearStep& p, int64_t slot, int head, int row) const {
    return u + ((slot * p.num_heads + head) * rows + row) * p.value_dim;
  }
  ATTNOPS_HOST_DEVICE float* k_row(const LinearStep& p, int64_t slot, int head, int row) const {
    return k + ((slot * num_groups + head / p.heads_per_group) * rows + row) * p.key_dim;
  }
  ATTNOPS_HOST_DEVICE float* decay_row(const LinearStep& p, int64_t slot, int head, int row) const {
    return decay + ((slot * p.num_heads + head) * rows + row) * (per_channel ? p.key_dim : 1);
  }
  // A length without room for the drafts counts as the longest that has it.
  ATTNOPS_HOST_DEVICE int within(int length, int drafts) const {
    const int most = rows - drafts;
    return length < 0 ? 0 : length > most ? most : length;
  }
  // Rows before the drafts.
  ATTNOPS_HOST_DEVICE int length(int64_t slot, int drafts) const { return within(lengths[slot], drafts); }
};

// Records the requests before one that name its slot.
struct SharedSlots {
  ReportOp op;
  const LinearStep& step;
  int64_t request;
  int32_t* to;

  ATTNOPS_HOST_DEVICE void operator()(int64_t slot) const {
    for (int64_t other = 0; other < request; ++other) {
      if (step.state_indices[other] == slot) record_fault(to, {op, kReportSharedSlot, request, other, slot, 0});
    }
  }
};

// Draft tokens of each request, the rows of `step`, from states that are only read.
struct LinearVerify {
  LinearStep step;
  StateRings rings;
  int drafts;                // of a request, 1 to kMaxDrafts
  const uint8_t* tree_mask;  // [batch_size, drafts, ceil(drafts / 8)], packed; null: a chain

  ATTNOPS_HOST_DEVICE uint32_t ancestors(int64_t request, int t) const {
    return draft_ancestors(tree_mask, drafts, request, t);
  }

  ATTNOPS_HOST_DEVICE void check(ReportOp op, int64_t request, int32_t* to) const {
    check_with(op, request, to, SharedSlots{op, step, request, to});
  }

  // The same, where `find_shared` records the earlier request that names a slot of the pool.
  template <typename FindShared>
  ATTNOPS_HOST_DEVICE void check_with(ReportOp op, int64_t request, int32_t* to, const FindShared& find_shared) const {
    check_ring(op, step, rings, drafts, request, to, find_shared);
  }

  template <typename FindShared>
  ATTNOPS_HOST_DEVICE static void check_ring(ReportOp op, const LinearStep& p, const StateRings& rings, int drafts,
                                             int64_t request, int32_t* to, const FindShared& find_shared) {
    const int64_t slot = p.state_indices[request];
    if (slot < 0) return;
    if (slot >= p.num_slots) return record_fault(to, {op, kReportStateSlot, request, 0, slot, p.num_slots});
    find_shared(slot);
    const int64_t most = rings.rows - drafts, length = rings.lengths[slot];
    if (length < 0 || length > most) record_fault(to, {op, kReportRingLength, request, 0, length, most + 1});
  }
};

// Keeps the drafts of each request's accepted path, or folds its ring into the state.
struct LinearCommit {
  LinearStep step;  // of which the states alone are given
  StateRings rings;
  int drafts;
  const int32_t* path;      // [batch_size, drafts]: drafts, rising
  const int32_t* accepted;  // [batch_size]: how many of them
  bool fold;                // whatever the ring's room

  ATTNOPS_HOST_DEVICE int num_accepted(int64_t request) const {
    const int own = accepted[request];
    return own < 0 ? 0 : own > drafts ? drafts : own;
  }
  // The ring's row that holds accepted draft i; what is no draft counts as the nearest.
  ATTNOPS_HOST_DEVICE int draft_row(int64_t request, int length, int i) const {
    const int draft = path[request * drafts + i];
    return length + (draft < 0 ? 0 : draft >= drafts ? drafts - 1 : draft);
  }
  // A ring without room for the next drafts is folded.
  ATTNOPS_HOST_DEVICE bool folds(int length, int more) const { return fold || length + more + drafts > rings.rows; }

  // Where a request's length is, null without one, and what it will be.
  struct Cursor {
    int32_t* length;
    int32_t moved;
  };
  ATTNOPS_HOST_DEVICE Cursor cursor(int64_t request) const {
    const int64_t slot = step.state_indices[request];
    if (slot < 0 || slot >= step.num_slots) return {nullptr, 0};
    const int length = rings.length(slot, drafts), more = num_accepted(request);
    return {rings.lengths + slot, folds(length, more) ? 0 : length + more};
  }
  // After all heads of a request.
  ATTNOPS_HOST_DEVICE void move_cursor(int64_t request) const {
    const Cursor own = cursor(request);
    if (own.length != nullptr) *own.length = own.moved;
  }

  ATTNOPS_HOST_DEVICE void check(ReportOp op, int64_t request, int32_t* to) const {
    check_with(op, request, to, SharedSlots{op, step, request, to});
  }

  template <typename FindShared>
  ATTNOPS_HOST_DEVICE void check_with(ReportOp op, int64_t request, int32_t* to, const FindShared& find_shared) const {
    LinearVerify::check_ring(op, step, rings, drafts, request, to, find_shared);
    if (step.state_indices[request] < 0) return;
    if (accepted[request] < 0 || accepted[request] > drafts) {
      return record_fault(to, {op, kReportAccepted, request, 0, accepted[request], drafts + 1});
    }
    for (int i = 0, before = -1; i < accepted[request]; ++i) {
      const int draft = path[request * drafts + i];
      if (draft <= before || draft >= drafts) record_fault(to, {op, kReportPath, request, i, draft, drafts});
      before = draft;
    }
  }
};

inline constexpr ReportOp kReportDeltaDraftStep{48}, kReportSsdDraftStep{49};

// A commit of the drafts before, and the verification behind it.
struct LinearDraftStep {
  LinearVerify verify;      // whose states are written where a ring is folded
  const int32_t* path;      // [batch_size, drafts]: drafts of the verification before, rising
  const int32_t* accepted;  // [batch_size]: how many of them
  int32_t* semaphores;      // on CUDA, [batch_size, num_groups + 1], zeros between calls: heads that are done reading

  ATTNOPS_HOST_DEVICE LinearCommit commit() const {
    return {.step = verify.step,
            .rings = verify.rings,
            .drafts = verify.drafts,
            .path = path,
            .accepted = accepted,
            .fold = false};
  }
};

}  // namespace attnops
