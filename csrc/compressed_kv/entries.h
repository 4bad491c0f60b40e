#pragma once
#include "compressed_kv/params.h"
#include "core/bounds.h"
#include "core/math.h"

// Which tokens an entry pools and where it goes, alike on the CPU and on the GPU.
namespace attnops::compressed_kv {

// New tokens of a request: rows [first, first + count) at positions `start` on. None, where values make no sense.
struct NewTokens {
  int64_t first, count, start;

  ATTNOPS_HOST_DEVICE NewTokens(const int32_t* bounds, const int32_t* lengths, int64_t request, int64_t num_tokens) {
    first = bounds[request];
    count = bounds[request + 1] - first;
    start = lengths[request] - count;
    if (first < 0 || count < 0 || first + count > num_tokens || start < 0) count = 0;
  }
};

ATTNOPS_HOST_DEVICE inline NewTokens new_tokens(const Params& p, int64_t request) {
  return {p.cu_seqlens_q, p.cache_seqlens, request, p.num_tokens};
}

ATTNOPS_HOST_DEVICE inline bool in_pool(const Params& p, int64_t request) {
  return p.state_indices[request] >= 0 && p.state_indices[request] < p.num_slots;
}

// How many entries `count` tokens at `start` complete.
ATTNOPS_HOST_DEVICE inline int64_t entries_of(const NewTokens& tokens, int ratio) {
  return tokens.count <= 0 ? 0 : (tokens.start + tokens.count) / ratio - tokens.start / ratio;
}

// An upper bound of the entries of a step, from shapes alone.
inline int64_t most_entries(const Params& p) { return min_of(p.num_tokens, p.num_tokens / p.ratio + p.batch_size); }

struct Entry {
  int64_t request, index;  // request -1: there is no such entry
};

ATTNOPS_HOST_DEVICE inline Entry entry_of(const Params& p, int64_t number) {
  const int64_t request = request_of(p.entry_indptr, p.batch_size, number);
  if (request < 0 || !in_pool(p, request)) return {-1, 0};
  const NewTokens tokens = new_tokens(p, request);
  const int64_t nth = number - p.entry_indptr[request];
  if (nth < 0 || nth >= entries_of(tokens, p.ratio)) return {-1, 0};
  return {request, tokens.start / p.ratio + nth};
}

// Values and scores of a token at a position: a new one, or one that the state keeps.
ATTNOPS_HOST_DEVICE inline const char* token_row(const Params& p, int64_t request, const NewTokens& tokens,
                                                 int64_t position) {
  const int64_t row = 2 * p.width();
  const int64_t at = position >= tokens.start
                         ? (tokens.first + position - tokens.start) * p.stride_token
                         : p.state_indices[request] * p.stride_slot + position % p.state_tokens * row;
  return static_cast<const char*>(position >= tokens.start ? p.kv_score : p.state) + at * size_of(p.dtype);
}

struct Place {
  int64_t page;
  int offset;
  bool valid;
};

ATTNOPS_HOST_DEVICE inline Place place_of(const Params& p, const Entry& entry, int32_t* report) {
  const int64_t cell = page_of(entry.index, p.page_size, p.page_shift);
  if (cell >= p.max_pages) {
    if (report != nullptr) {
      record_fault(report, {kReportCompressKv, kReportTableCell, entry.request, entry.index, cell, p.max_pages});
    }
    return {0, 0, false};
  }
  const int64_t page = p.page_table[entry.request * p.stride_table + cell];
  const bool valid = page >= 0 && page < p.num_pages;
  if (!valid && report != nullptr) {
    record_fault(report, {kReportCompressKv, ReportKind::kPageIndex, entry.request, cell, page, p.num_pages});
  }
  return {valid ? page : 0, static_cast<int>(entry.index - cell * p.page_size), valid};
}

// Whether a position has a row in cos_sin. Without one the entry is left out.
ATTNOPS_HOST_DEVICE inline bool has_rotation(const Params& p, const Entry& entry, int32_t* report) {
  const int64_t position = entry.index * p.ratio;
  if (position < p.max_positions) return true;
  if (report != nullptr) {
    record_fault(report,
                 {kReportCompressKv, kReportRotaryPosition, entry.request, entry.index, position, p.max_positions});
  }
  return false;
}

// Bounds and length of a request, in checked mode and on the CPU.
ATTNOPS_HOST_DEVICE inline void report_request(int32_t* report, ReportOp op, const int32_t* bounds,
                                               const int32_t* lengths, int64_t request, int64_t num_tokens) {
  report_bounds(report, op, bounds, request, num_tokens);
  const int64_t count = int64_t{bounds[request + 1]} - bounds[request];
  if (lengths[request] < count) {
    record_fault(report, {op, kReportShortLength, request, 0, lengths[request], count});
  }
}

ATTNOPS_HOST_DEVICE inline void report_request(const Params& p, int64_t request, int32_t* report) {
  report_request(report, kReportCompressKv, p.cu_seqlens_q, p.cache_seqlens, request, p.num_tokens);
  const int64_t slot = p.state_indices[request];
  if (slot >= p.num_slots) record_fault(report, {kReportCompressKv, kReportStateSlot, request, 0, slot, p.num_slots});
  for (int64_t other = 0; other < request && slot >= 0; ++other) {
    if (p.state_indices[other] == slot) {
      record_fault(report, {kReportCompressKv, kReportSharedSlot, request, other, slot, 0});
    }
  }
  const int64_t before = request == 0 ? 0 : p.entry_indptr[request];
  const int64_t expected = before + entries_of(new_tokens(p, request), p.ratio);
  if (p.entry_indptr[request + 1] != expected || p.entry_indptr[0] != 0) {
    record_fault(report, {kReportCompressKv, kReportEntryBound, request, 0, p.entry_indptr[request + 1], expected});
  }
}

}  // namespace attnops::compressed_kv
