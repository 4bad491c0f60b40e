#pragma once
#include "core/index_report.h"
#include "core/math.h"
#include "core/report.h"
#include "paged_kv/params.h"

// What every kernel of this family asks about a request, a page or a slot, on the CPU and on the GPU. Nothing here can
// read or write outside an array, whatever the indices are.
namespace attnops::paged_kv {

// What the arrays say about a request: read at once, so that a kernel waits for memory once.
struct RequestWords {
  int64_t row;        // of req_to_token
  int length, first;  // where in its row it begins
};

ATTNOPS_HOST_DEVICE inline RequestWords words_of(const Requests& r, int request) {
  return {r.req_pool_indices[request], r.cache_seqlens[request],
          r.first_tokens == nullptr ? 0 : r.first_tokens[request]};
}

ATTNOPS_HOST_DEVICE inline bool has_row(const Requests& r, const RequestWords& w) {
  return w.row >= 0 && w.row < r.max_requests;
}

// Where in its row a request begins.
ATTNOPS_HOST_DEVICE inline int first_token(const Requests& r, const RequestWords& w) {
  return min_of(max_of(w.first, 0), r.max_tokens);
}

// Tokens of a request that get pages: none of one without a row. Checked mode leaves out a length or a beginning out of
// range, too; production clamps it.
ATTNOPS_HOST_DEVICE inline int num_tokens(const Requests& r, const RequestWords& w) {
  const int most = r.max_tokens - first_token(r, w);
  if (!has_row(r, w)) return 0;
  if (r.checked && (w.length < 0 || w.length > most || w.first != first_token(r, w))) return 0;
  return min_of(max_of(w.length, 0), most);
}

ATTNOPS_HOST_DEVICE inline int num_pages(const Requests& r, int tokens) {
  return r.page_shift >= 0 ? (tokens >> r.page_shift) + ((tokens & (r.page_size - 1)) != 0)
                           : tokens / r.page_size + (tokens % r.page_size != 0);
}

// To be called once per request where there is a report.
ATTNOPS_HOST_DEVICE inline void report_request(const Requests& r, ReportOp op, int request, const RequestWords& w) {
  if (!has_row(r, w)) {
    record_fault(r.report, {op, ReportKind::kRequestSlot, request, 0, w.row, r.max_requests});
  } else if (r.checked && w.first != first_token(r, w)) {
    record_fault(r.report, {op, kReportRowStart, request, 0, w.first, int64_t{r.max_tokens} + 1});
  } else if (const int most = r.max_tokens - first_token(r, w); r.checked && (w.length < 0 || w.length > most)) {
    record_fault(r.report, {op, ReportKind::kLength, request, 0, w.length, int64_t{most} + 1});
  }
}

// The position whose token tells the page of a cell. Without a map that is the page's first token. With one it is the
// last: a window holds the newest tokens, so a page's last token is the last to leave.
ATTNOPS_HOST_DEVICE inline int position_of(const Requests& r, int tokens, int cell) {
  const int first = cell * r.page_size;  // below tokens, so it fits
  return r.slot_map.data != nullptr ? first + min_of(r.page_size, tokens - first) - 1 : first;
}

// Page of the token at `position` of a request. A page wholly outside the window, and a slot that is no slot, give
// page 0: legal to load, never looked at.
ATTNOPS_HOST_DEVICE inline int32_t page_of_slot(const Requests& r, ReportOp op, int request, int position,
                                                int64_t slot) {
  const bool mapped = r.slot_map.data != nullptr;
  const int64_t limit = mapped ? r.slot_map.size : INT32_MAX;
  if (slot < 0 || slot >= limit) {
    if (r.report != nullptr) record_fault(r.report, {op, ReportKind::kSlotIndex, request, position, slot, limit});
    return 0;
  }
  if (mapped) slot = r.slot_map[slot];
  return slot < 0 ? 0 : static_cast<int32_t>(page_of(slot, r.page_size, r.page_shift));
}

// Checked mode: a kernel reads the tokens of a page one after another, so each must have the slot that this says.
// Records the first that has another; not in a page whose own slot was no slot, which page_of_slot has recorded. `row`
// is the request's in req_to_token. A token that has left the window has no slot to compare.
ATTNOPS_HOST_DEVICE inline void report_order(const Requests& r, ReportOp op, int request, const int32_t* row,
                                             int tokens, int cell, int32_t page) {
  const bool mapped = r.slot_map.data != nullptr;
  const int64_t limit = mapped ? r.slot_map.size : INT32_MAX;
  const int first = cell * r.page_size, count = min_of(r.page_size, tokens - first);
  const int64_t looked_up = row[position_of(r, tokens, cell)];
  if (looked_up < 0 || looked_up >= limit) return;
  for (int i = 0; i < count; ++i) {
    int64_t slot = row[first + i];
    if (slot < 0 || slot >= limit) {
      return record_fault(r.report, {op, ReportKind::kSlotIndex, request, first + i, slot, limit});
    }
    if (mapped) slot = r.slot_map[slot];
    const int64_t expected = int64_t{page} * r.page_size + i;
    if (slot == expected || (mapped && slot < 0)) continue;
    return record_fault(r.report, {op, ReportKind::kSlotOrder, request, first + i, slot, expected});
  }
}

// Of a request that has a row.
ATTNOPS_HOST_DEVICE inline const int32_t* tokens_of(const Requests& r, const RequestWords& w) {
  return r.req_to_token + w.row * r.req_to_token_stride + first_token(r, w);
}

ATTNOPS_HOST_DEVICE inline int32_t last_page_len(const Requests& r, int tokens) {
  return tokens == 0 ? 0 : tokens - (num_pages(r, tokens) - 1) * r.page_size;
}

// A negative slot is padding and stays what it is; one outside the map becomes padding, too.
ATTNOPS_HOST_DEVICE inline int64_t translated(const TranslateParams& p, int64_t i) {
  const int64_t slot = p.slots[i];
  if (slot < 0) return slot;
  if (slot < p.slot_map.size) return p.slot_map[slot];
  if (p.report != nullptr) {
    record_fault(p.report, {ReportOp::kTranslateSlots, ReportKind::kSlotIndex, i, i, slot, p.slot_map.size});
  }
  return -1;
}

// Where token `token` is stored: page and offset in it. Negative slots are padding; a slot outside the pool is not
// stored either, and reported in checked mode.
struct Place {
  int64_t page;
  int offset;
  bool store;
};

ATTNOPS_HOST_DEVICE inline Place place_of(const StoreTarget& t, int64_t token) {
  const int64_t slot = t.out_cache_loc[token];
  if (slot < 0 || slot >= t.num_slots) return {0, 0, false};
  const int64_t page = page_of(slot, t.page_size, t.page_shift);
  return {page, static_cast<int>(slot - page * t.page_size), true};
}

// To be called once per token in checked mode.
ATTNOPS_HOST_DEVICE inline void report_slot(const StoreTarget& t, ReportOp op, int64_t token) {
  const int64_t slot = t.out_cache_loc[token];
  if (slot >= t.num_slots) record_fault(t.report, {op, ReportKind::kSlotIndex, token, token, slot, t.num_slots});
}

// Scale of 128 latents of the 656-byte row. Never below the smallest normal float: zeros stay zeros, not 0 / 0.
ATTNOPS_HOST_DEVICE inline float group_scale(float amax) { return max_of(amax / 448.f, 0x1p-126f); }

}  // namespace attnops::paged_kv
