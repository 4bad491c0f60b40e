#include "torch_bindings/cpu_faults.h"

#include <string>

#include "core/block_report.h"
#include "core/compress_report.h"
#include "core/index_report.h"
#include "core/list_report.h"
#include "core/state_report.h"
#include "core/tree_report.h"
#include "torch_bindings/check.h"

namespace attnops {
void CpuFaults::check() const {
  if (own_[kReportCount] == 0) return;
  const auto text = [&](ReportSlot slot) { return std::to_string(own_[slot]); };
  const std::string in_range = " must be in [0, " + text(kReportLimit) + ")";
  const std::string request = ", request " + text(kReportRequest), got = ", got " + text(kReportValue);
  const ReportKind kind = static_cast<ReportKind>(own_[kReportKind]);
  if (kind == kReportTreeParent) {
    fail(op_, "top_scores_index" + request + ", draft " + text(kReportPosition) +
                  ": its parent must be one of the nodes before it, [0, " + text(kReportLimit) + ")" + got +
                  (own_[kReportValue] < 0 ? " (none of the tree)" : ""));
  }
  if (kind == kReportTreeLink) {
    fail(op_, "retrieve_next_token or retrieve_next_sibling" + request + ", node " + text(kReportPosition) +
                  " must be -1 or another node, [1, " + text(kReportLimit) + "), without a circle" + got);
  }
  if (kind == kReportTreeIndex) {
    fail(op_, "retrieve_index" + request + ", node " + text(kReportPosition) + " must be a row of its request, [0, " +
                  text(kReportLimit) + ") from its first" + got);
  }
  if (kind == kReportTokenIndex) {
    fail(op_, "candidates" + request + ", node " + text(kReportPosition) + in_range + " (the vocabulary)" + got);
  }
  if (kind == kReportProbability) {
    fail(op_, "target_probs" + request + ", node " + text(kReportPosition) + ", token " + text(kReportValue) +
                  " must be a finite number of at least 0");
  }
  if (kind == kReportAcceptIndex) {
    fail(op_, "accept_index" + request + ", place " + text(kReportPosition) +
                  " must be negative or a row of its request, [" + text(kReportPosition) + ", " + text(kReportLimit) +
                  ") from its first" + got);
  }
  if (kind == kReportDraftCells) {
    fail(op_, "cache_seqlens[" + text(kReportRequest) + "]: prefix and drafts must need cells below " +
                  text(kReportLimit) + " (max_context of req_to_token; lengths do not count drafts)" + got);
  }
  if (kind == kReportMaskBounds) {
    fail(op_, "mask_indptr" + request + " must be within mask and bound " + text(kReportLimit) +
                  " rows of at least as many bytes" + got + " bytes");
  }
  if (kind == kReportHiddenPrefix) {
    fail(op_, "mask" + request + ", draft " + text(kReportPosition) + " must see the whole prefix, and hides key " +
                  text(kReportValue));
  }
  if (kind == kReportShortLength) {
    fail(op_, "cache_seqlens" + request + " must be at least " + text(kReportLimit) + ", its new tokens" + got);
  }
  if (kind == kReportEntryBound) {
    fail(op_, "entry_indptr behind request " + text(kReportRequest) + " must be " + text(kReportLimit) +
                  " as compress_plan makes it of these lengths" + got);
  }
  if (kind == kReportRotaryPosition) {
    fail(op_, "cos_sin" + request + ", entry " + text(kReportPosition) + ": its position" + in_range +
                  " (max_positions)" + got);
  }
  if (kind == kReportStateSlot) {
    fail(op_, "state" + request + ", slot" + in_range + " (num_slots of " + pages_ + "), or below 0 for padding" + got);
  }
  if (kind == kReportSharedSlot) {
    fail(op_, "requests " + text(kReportPosition) + " and " + text(kReportRequest) + " write the same slot, " +
                  text(kReportValue) + ": each state belongs to one request");
  }
  if (kind == kReportTokenBounds) {
    fail(op_, "cu_seqlens" + request + " must bound tokens in [0, " + text(kReportLimit) + "], rising; got " +
                  text(kReportPosition) + " to " + text(kReportValue));
  }
  if (kind == kReportRowStart)
    fail(op_, "row_starts[" + text(kReportRequest) + "]" + in_range + " (num_columns of logits)" + got);
  if (kind == kReportRowLength) {
    const char* lengths = static_cast<ReportOp>(own_[kReportOp]) == kReportTopkSelect ? "lengths[" : "cache_seqlens[";
    fail(op_, lengths + text(kReportRequest) + "] must be below " + text(kReportLimit) + " (columns from " +
                  text(kReportPosition) + " on)" + got);
  }
  if (kind == kReportRowRequest)
    fail(op_, "row_to_request[" + text(kReportRequest) + "]" + in_range + " (num_requests of page_table)" + got);
  if (kind == kReportKeyRange) {
    fail(op_, "k_start and k_end, row " + text(kReportRequest) + " must be keys in [0, " + text(kReportLimit) +
                  "], which k and the columns of logits hold; got " + text(kReportPosition) + " to " +
                  text(kReportValue));
  }
  if (kind == kReportTableCell) {
    fail(op_, "page_table, row " + text(kReportRequest) + ", position " + text(kReportPosition) + ": its page" +
                  in_range + " (max_pages)" + got);
  }
  if (kind == kReportSlotRange) {
    fail(op_, "page_table or offsets, row " + text(kReportRequest) + ", position " + text(kReportPosition) + in_range +
                  ", so that an index is an int32" + got);
  }
  if (kind == kReportRowIndex || kind == kReportExtraRowIndex) {
    const bool extra = kind == kReportExtraRowIndex;
    fail(op_, (extra ? "extra_indices, token " : "indices, token ") + text(kReportRequest) + ", position " +
                  text(kReportPosition) + in_range + " (rows of " + (extra ? "extra_kv_pages" : pages_) +
                  "), or below 0 for no key" + got);
  }
  if (kind == kReportListLength || kind == kReportExtraListLength) {
    fail(op_, (kind == kReportListLength ? "topk_length, token " : "extra_topk_length, token ") + text(kReportRequest) +
                  " must be below " + text(kReportLimit) + " (its list has no more)" + got);
  }
  if (kind == kReportPrefix) fail(op_, "prefix_lens[" + text(kReportRequest) + "] must be at least 0" + got);
  if (kind == kReportPlan) {
    fail(op_, "plan[" + text(kReportRequest) + "]" + in_range + " (batch_size), and name each request once" + got);
  }
  if (kind == kReportRingLength) {
    fail(op_,
         "ring_len, request " + text(kReportRequest) + in_range + " (so that its ring has room for the drafts)" + got);
  }
  if (kind == kReportAccepted) fail(op_, "accepted_len[" + text(kReportRequest) + "]" + in_range + " (drafts)" + got);
  if (kind == kReportPath) {
    fail(op_, "accepted_path" + request + ", position " + text(kReportPosition) + in_range + " (drafts), rising" + got);
  }
  if (kind == kReportBlockIndex) {
    fail(op_, "block_list, row " + text(kReportRequest) + " (request, KV head), position " + text(kReportPosition) +
                  in_range + " (blocks of its request), or below 0 for none" + got);
  }
  if (kind == kReportBlockRoom) {
    fail(op_, "block_tables, row " + text(kReportRequest) + " (request, KV head) needs fewer cells than " +
                  text(kReportLimit) + " (num_cells, and one)" + got);
  }
  switch (kind) {
    case ReportKind::kRequestSlot:
      fail(op_, "req_pool_indices[" + text(kReportRequest) + "]" + in_range + " (max_requests of req_to_token)" + got);
    case ReportKind::kSlotIndex:
      fail(op_, (*pages_ != 0 ? pages_ : "req_to_token") + request + ", position " + text(kReportPosition) + in_range +
                    " (token slots)" + got);
    case ReportKind::kLength:
      fail(op_, "cache_seqlens[" + text(kReportRequest) + "] must be below " + text(kReportLimit) +
                    " (the tokens that its page_table row holds)" + got);
    default:
      fail(op_, "page_table" + request + ", page " + text(kReportPosition) + in_range + " (num_pages of " + pages_ +
                    ")" + got);
  }
}

void CpuFaults::check_lengths(ReportOp op, const PageTable& table, const int32_t* cache_seqlens, int batch_size) {
  for (int request = 0; request < batch_size; ++request) {
    const int64_t capacity = table.num_cells(request) * table.page_size, length = cache_seqlens[request];
    if (length > capacity) {
      record_fault(report_, {op, ReportKind::kLength, request, 0, length, capacity + 1});
    } else if (length > 0 && table.num_pages == 0) {  // kernels see no key then, and look up no page
      record_fault(report_, {op, ReportKind::kPageIndex, request, 0, table.row(request)[0], 0});
    }
    check();
  }
}

}  // namespace attnops
